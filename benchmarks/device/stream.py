"""All virtual ranks' copies of one plan at the same time, against the device's own plain copy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench import PATIENCE_NS, Bench
from report import Report, require, require_ok
from routes import make_routes
from ultraep_kernels.device.relays import Sends, plan_sends
from ultraep_kernels.device.status import new_status
from ultraep_kernels.device.stream import stream, wait_slots

from tests.support.virtual_ranks import VirtualRanks, fill_masters, make_ranks, only, wrong_slots
from ultraep_serve.planner.quota import plan_quota
from ultraep_serve.types import ExpertShape

STREAM_TARGET = 0.9  # of the rate of a plain copy
IMBALANCE = 2.0


@dataclass(frozen=True)
class Sizes:
    """What is streamed."""

    shape: ExpertShape
    tokens: int  # of one rank
    top_k: int
    tensor_bytes: tuple[int, ...]  # of one expert
    chunk_bytes: int
    copy_bytes: int  # of the buffer that tells the device's own bandwidth


FULL = Sizes(
    shape=ExpertShape(64, 256, 2),
    tokens=8192,
    top_k=8,
    tensor_bytes=(4096 * 4096, 4096 * 2048, 8192, 4096),  # FP8 weights and block scales
    chunk_bytes=1 << 20,
    copy_bytes=4 << 30,
)
TINY = Sizes(ExpertShape(4, 16, 2), 50, 2, (80, 37), 64, 64)


def run(bench: Bench, report: Report) -> None:
    """Direct, and with relays wherever they can be."""
    sizes = TINY if bench.dry_run else FULL
    routes = make_routes(sizes.shape, sizes.tokens, sizes.top_k, IMBALANCE, bench.device)
    planned = plan_quota(routes.loads, sizes.shape, 0).slot_expert
    slots = torch.from_numpy(planned).to(bench.device)
    ranks = make_ranks(sizes.shape, sizes.tensor_bytes, sizes.chunk_bytes, bench.device)
    fill_masters(ranks)
    copy_rate = measure_copy(bench, sizes.copy_bytes)
    for epoch, mode in enumerate(("never", "always"), 1):
        arguments = bench, sizes, ranks, slots, mode, epoch, copy_rate
        report.run(f"stream, relay {mode}", check_stream, *arguments)


def check_stream(
    bench: Bench,
    sizes: Sizes,
    ranks: VirtualRanks,
    slots: torch.Tensor,
    mode: str,
    number: int,
    copy_rate: float | None,
) -> dict[str, Any]:
    """Every filled slot's bytes are its master's, and how fast they came."""
    ranks.empty_slots()
    epoch = torch.tensor([number, 0], device=bench.device)
    status = new_status(bench.device)
    sends = sends_of(ranks, slots, mode)
    _, microseconds = bench.replayed(sender(bench, ranks, slots, sends, epoch, status))
    require_arrived(ranks, slots, epoch, status)
    moved = int((slots >= 0).sum()) * sum(sizes.tensor_bytes)
    rate = 2e-3 * moved / microseconds if microseconds else None
    share = rate / copy_rate if rate and copy_rate else None
    return {
        "checked": "the masters' bytes",
        "ranks": sizes.shape.num_ranks,
        "megabytes": moved / 1e6,
        "graph_microseconds": microseconds,
        "gigabytes_per_second": rate,  # read and written
        "copy_gigabytes_per_second": copy_rate,
        "of_copy": share,
        "at_least": STREAM_TARGET,
        "met": share >= STREAM_TARGET if share else None,
    }


def sends_of(ranks: VirtualRanks, slots: torch.Tensor, mode: str) -> list[Sends]:
    """Who sends what, by rank; all ranks are in one domain."""
    num_ranks, masters = ranks.shape.num_ranks, ranks.shape.num_masters
    return [plan_sends(slots, masters, rank, mode, num_ranks) for rank in range(num_ranks)]


def sender(
    bench: Bench,
    ranks: VirtualRanks,
    slots: torch.Tensor,
    sends: list[Sends],
    epoch: torch.Tensor,
    status: torch.Tensor,
) -> Callable[[], None]:
    """Lets all ranks send, and then forward, as they share a device."""
    kinds = [kind for kind in (0, 1) if any(int(send.tasks[kind, 0]) for send in sends)]
    phases = [[only(send, kind) for send in sends] for kind in kinds]

    def send_all(rank: int, send: Sends) -> None:
        arguments = ranks.tables[rank], rank, epoch, status, PATIENCE_NS
        stream(send, slots, ranks.shape.num_masters, *arguments, num_programs=bench.num_programs)

    def run() -> None:
        for phase in phases:
            bench.at_once([partial(send_all, rank, send) for rank, send in enumerate(phase)])

    return run


def require_arrived(
    ranks: VirtualRanks, slots: torch.Tensor, epoch: torch.Tensor, status: torch.Tensor
) -> None:
    """Wait for all ranks' slots; AssertionError where one does not hold its master's bytes."""
    for rank, tables in enumerate(ranks.tables):
        wait_slots(slots, tables, rank, epoch, status, PATIENCE_NS)
    require_ok(status)
    wrong = wrong_slots(ranks, slots)
    require(not wrong, f"(rank, slot) {wrong} differ from their masters")


def measure_copy(bench: Bench, num_bytes: int) -> float | None:
    """Gigabytes per second, read and written, of the device's own copy of a large buffer."""
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=bench.device)
    target = torch.empty_like(source)
    _, microseconds = bench.replayed(lambda: target.copy_(source))
    return 2e-3 * num_bytes / microseconds if microseconds else None
