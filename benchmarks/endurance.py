"""Ranks killed at every stage, and groups that start and end: nothing hangs, differs or is left.

    cd benchmarks
    python endurance.py kills --kills 100 --json results/endurance-kills.json
    python endurance.py cycles --cycles 1000 --json results/endurance-cycles.json

``kills``: of a group that serves random batches (relays always, slots poisoned), one rank at a time
is killed after each stage, half of them at once and half a random moment later, in a copy or a
kernel. Every survivor must end with PeerTimeoutError within a minute, and must have computed
nothing wrong. ``cycles``: a group's processes meet, fill slots and end the group so often. Exits
with 1 if anything was wrong. Random batches themselves: ``random_batches.py --batches 50000``; real
servers: ``serving.py soak`` and ``serving.py restarts``.
"""

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

import harness
import numpy as np

from tests.support.endurance import Death, Footprint, cycle_group, kill_one, mortal_batches
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.types import Stage, TokenView

_LARGEST_DELAY = 0.003  # seconds: longer than a stage
_MAX_GROWTH = 1.05  # of resident memory, between the first tenth of all cycles and the last


def main() -> int:
    """Run one of the two; 1 where something was wrong."""
    parser = harness.parser(__doc__)
    parser.add_argument("what", choices=["kills", "cycles"])
    parser.add_argument("--kills", type=int, default=100, help="after each stage")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return kills(args) if args.what == "kills" else cycles(args)


def kills(args: argparse.Namespace) -> int:
    """Kill a rank after every stage."""
    rng = np.random.default_rng(args.seed)
    rows: list[dict[str, Any]] = []
    for stage in Stage:
        started, wrong = time.perf_counter(), []
        for number in range(args.kills):
            view = list(TokenView)[number // 2 % 2]
            delay = number % 2 * rng.uniform(0, _LARGEST_DELAY)
            death = Death(int(rng.integers(args.ranks)), stage, int(rng.integers(1, 12)), delay)
            wrong += kill_one(mortal_batches(args.ranks, view, int(rng.integers(2**31))), death)
        seconds = time.perf_counter() - started
        rows.append({"stage": stage.name.lower(), "kills": args.kills, "wrong": wrong})
        print(f"{rows[-1]['stage']:>9}: {args.kills} kills, {len(wrong)} wrong, {seconds:.0f} s")
        print("\n".join(wrong[:5]), end="\n" if wrong else "", flush=True)
    harness.write(args.json, {"ranks": args.ranks, "results": rows})
    return int(any(row["wrong"] for row in rows))


def cycles(args: argparse.Namespace) -> int:
    """Start and stop a group."""
    started = time.perf_counter()
    with fresh_run_path() as run_path:
        seen: list[dict[int, Footprint]] = run_ranks(
            cycle_group, args.ranks, args.ranks, run_path, args.cycles, timeout_seconds=7200
        )
        left = [str(path.relative_to(run_path)) for path in run_path.rglob("*")]
    grown = [rank for rank, rows in enumerate(seen) if has_grown(list(rows.values()))]
    for rank, rows in enumerate(seen):
        print(f"rank {rank}: {rows}")
    seconds = time.perf_counter() - started
    print(f"{args.cycles} cycles, {seconds:.0f} s, left behind: {left}, ranks that grew: {grown}")
    footprints = [
        [{"cycles": number, **asdict(row)} for number, row in rows.items()] for rows in seen
    ]
    harness.write(
        args.json,
        {"ranks": args.ranks, "left_behind": left, "grown": grown, "footprints": footprints},
    )
    return int(bool(left or grown))


def has_grown(rows: list[Footprint]) -> bool:
    """Whether a process holds more at the end than at its first footprint."""
    first, last = rows[0], rows[-1]
    if last.mappings > first.mappings or last.descriptors > first.descriptors:
        return True
    return last.resident_kibibytes > first.resident_kibibytes * _MAX_GROWTH


if __name__ == "__main__":
    sys.exit(main())
