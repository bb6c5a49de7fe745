"""By time against by count: one of two cores kept half busy, and both free.

    python benchmarks/speeds.py

Two servers of two ranks, one after the other: the first plans by equal speeds (counts), the second
by measured speeds (times). Each is sent the same prompts, first while both cores are free, then
while another process takes half of the second rank's core. The ranks' records say which speeds the
second had in use.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import harness
import numpy as np
from served import add_server_flags, model, new_records, serve
from ultraep_kernels.contract import FULL_SPEED

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import median_interval, ratios_json
from ultraep_lab.demo.balanced_server import installed_engine
from ultraep_lab.demo.text import sample_text
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.run_directory import find_run
from ultraep_serve.telemetry.run_files import RunFiles

PERIOD = 0.01  # seconds
SETTLE = 50  # prompts, until measured speeds are those of the phase
Phase: TypeAlias = list[tuple[list[float], dict[str, Any]]]


def main() -> None:
    """Serve, measure, print a line per phase, write the JSON."""
    parser = harness.parser(__doc__, "speeds.json")
    add_server_flags(parser)
    parser.add_argument("--prompt-tokens", type=harness.numbers, default=(2048, 4096, 8192))
    parser.add_argument("--rounds", type=int, default=15, help="per length and phase")
    parser.add_argument("--busy", type=float, default=0.5, help="part of the core that is taken")
    parser.add_argument("--core", type=int, default=1, help="of the second rank")
    options = parser.parse_args()
    by_count, by_time = (measure(options, speeds) for speeds in ("equal", "auto"))
    document = {"engine": installed_engine(), "mode": options.mode}
    document |= {name: compared(options, by_count[name], by_time[name]) for name in by_count}
    harness.write(options.json, document | {"busy_part_of_core": options.busy})


class Rings:
    """The records of both ranks."""

    def __init__(self, port: int) -> None:
        run_path = find_run(port=port)
        self._readers = [RingReader(RunFiles(run_path).ring(rank)) for rank in range(2)]

    def new(self) -> list[RecordArray]:
        """Those written since the last call, by rank."""
        return new_records(self._readers)


def measure(options: argparse.Namespace, speeds: str) -> dict[str, Phase]:
    """Both phases of a server that plans by ``speeds``."""
    with (
        serve(options, model(options.model), "bfloat16", "--speeds", speeds) as running,
        closing(Server(running.url)) as server,
    ):
        rings = Rings(running.port)
        free = phase(options, server, rings)
        with busy(options.core, options.busy):
            return {"free": free, "busy": phase(options, server, rings)}


def phase(options: argparse.Namespace, server: Server, rings: Rings) -> Phase:
    """By prompt length: seconds to first token, and which speeds were in use."""
    for number in range(SETTLE):
        server.first_token(prompt(min(options.prompt_tokens), number))
    found: Phase = []
    for tokens in options.prompt_tokens:
        server.first_token(prompt(tokens, -1))  # warms up
        rings.new()
        took = [server.first_token(prompt(tokens, n)).seconds for n in range(options.rounds)]
        found.append((took, in_use(rings.new())))
    return found


def compared(options: argparse.Namespace, counts: Phase, times: Phase) -> list[dict[str, Any]]:
    """One row per prompt length: medians, and the ratios by count / by time of the same prompts."""
    rows = []
    for tokens, (by_count, _), (by_time, used) in zip(
        options.prompt_tokens, counts, times, strict=True
    ):
        ratios = [count / time for count, time in zip(by_count, by_time, strict=True)]
        row = {
            "prompt_tokens": tokens,
            "by_count_seconds": summary(by_count),
            "by_time_seconds": summary(by_time),
            "by_count_over_by_time": ratios_json(ratios),
            **used,
        }
        print(row, flush=True)
        rows.append(row | {"samples": {"equal": by_count, "auto": by_time}})
    return rows


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median and its interval (95 %)."""
    return {"median": statistics.median(seconds), "interval": median_interval(seconds)}


def in_use(records: list[RecordArray]) -> dict[str, Any]:
    """Which speeds batches were planned with, by the first rank's records."""
    _, first = np.unique(records[0]["batch"], return_index=True)
    speeds = records[0]["speed"][first]
    changed = (np.diff(speeds, axis=0) != 0).any(axis=1)
    unequal = speeds[(speeds != FULL_SPEED).any(axis=1)]
    return {
        "batches": len(speeds),
        "batches_planned_with_unequal_speeds": len(unequal),
        "changes_of_speeds": int(changed.sum()),
        "median_speeds_where_unequal": np.median(unequal, axis=0).tolist()
        if len(unequal)
        else None,
        "nanoseconds_per_assignment": [
            float(mine["experts_ns"].sum() / mine["load_after"][:, rank].sum())
            for rank, mine in enumerate(records)
        ],
    }


def prompt(tokens: int, number: int) -> str:
    """A text of its own for every ``number``."""
    return f"{number}. " + sample_text("law", tokens, 1000 + number)


@contextmanager
def busy(core: int, part: float) -> Iterator[None]:
    """Another process takes ``part`` of ``core``."""
    process = multiprocessing.Process(target=take, args=(core, part), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), "the other process could not take the core: run this as root"
    finally:
        process.kill()
        process.join()


def take(core: int, part: float) -> None:
    """Compute for ``part`` of every 10 ms, before anybody else.

    In real time: beside ranks that wait without sleep, a share of the core that the scheduler
    is to make fair arrived in stalls of whole seconds for both.
    """
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while True:
        until = time.process_time() + part * PERIOD
        while time.process_time() < until:
            pass
        time.sleep((1 - part) * PERIOD)


if __name__ == "__main__":
    main()
