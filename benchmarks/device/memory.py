"""Slots and fabric over the driver: one process alone, several, and one of them killed."""

from fabric_checks import (
    RANKS,
    ExpertSizes,
    GroupSizes,
    check_death,
    check_processes,
    check_slots,
)
from report import Report

from tests.support.bench import Bench
from ultraep_serve.balance.cuda.fabric import MOST_CHUNK_BYTES

# Qwen3-235B's, 8 of 128 on a rank of 16
EXPERTS = ExpertSizes(8, 4096, 1536, 256, MOST_CHUNK_BYTES)
TINY_EXPERTS = ExpertSizes(2, 128, 128, 4, 1 << 13)
GROUP = GroupSizes(EXPERTS, 10, 16, 20_000_000_000, 500_000_000, 70.0)
TINY_GROUP = GroupSizes(TINY_EXPERTS, 2, 2, 2_000_000_000, 10_000_000, 240.0)


def slots(bench: Bench, report: Report) -> None:
    """Replica slots behind masters: is what unit tests assume of CUDA true?"""
    sizes = TINY_EXPERTS if bench.interpreted else EXPERTS
    checked = "masters, aliases and products"
    report.run("slots behind masters", lambda: {"checked": checked, **check_slots(bench, sizes)})


def processes(bench: Bench, report: Report) -> None:
    """They fill each other's slots through imported memory; then one is killed between layers."""
    sizes = TINY_GROUP if bench.interpreted else GROUP
    bytes_and_rows = {"checked": "the masters' bytes, the rows"}
    report.run(
        f"{RANKS} processes, direct and relayed",
        lambda: bytes_and_rows | {"slots_filled_by_rank": check_processes(sizes)},
    )
    told = {"checked": "PeerTimeoutError of all others"}
    report.run("one of them is killed", lambda: told | {"told": check_death(sizes)})
