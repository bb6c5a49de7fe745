"""How well and how fast the quota planner balances: Zipf-like loads, and real traces if given.

    python benchmarks/planner_quality.py --traces DIR --json benchmarks/results/planner_quality.json

Every layer of every batch of a trace is one case, its tokens split evenly over the source ranks.
Zipf cases have 1024 tokens per rank, top-8, with the exponent chosen to meet the imbalance.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np

from ultraep_serve.offline.store import load_trace
from ultraep_serve.offline.trace import batches
from ultraep_serve.planner.quota import plan_quota, warm_up
from ultraep_serve.types import ExpertShape, imbalance

ZIPF_SIZES = ((2, 16), (8, 128), (32, 128), (64, 256), (64, 512), (72, 504))  # (R, E)
ZIPF_IMBALANCES = (1.5, 2.0, 3.0, 4.0)
TOKENS_PER_RANK, TOP_K = 1024, 8


@dataclass(frozen=True)
class Cases:
    """One row of the table."""

    name: str
    loads: list[np.ndarray]  # each (R, E)


def main() -> None:
    """Print the table; write it with the machine and the command to --json."""
    args = parse_arguments()
    rows = []
    print(f"{'cases':24} {'R':>3} {'E':>4} {'S':>2} {'n':>5} {'before':>7} {'after':>7} "
          f"{'worst':>7} {'sender':>7} {'copies':>7} {'us':>6}")  # fmt: skip
    for cases in (*trace_cases(args), *zipf_cases(args)):
        for num_slots in args.slots:
            rows.append(measure(cases, num_slots, args.repeat))
            print("{name:24} {num_ranks:3} {num_experts:4} {num_slots:2} {cases:5} {before:7.3f} "
                  "{after:7.4f} {worst_after:7.4f} {busiest_sender:7.2f} {replicas:7.1f} "
                  "{median_microseconds:6.0f}".format(**rows[-1]), flush=True)  # fmt: skip
    harness.write(args.json, {"rows": rows})


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, help="directory of .npz traces (default: none)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32], help="for traces")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 1], help="slots per rank")
    parser.add_argument("--zipf-cases", type=int, default=20, help="per size and imbalance")
    parser.add_argument("--repeat", type=int, default=3, help="timed plans per case")
    return parser.parse_args()


def trace_cases(args: argparse.Namespace) -> Iterator[Cases]:
    """Every layer of every whole batch of each trace."""
    for path in sorted(args.traces.glob("*.npz")) if args.traces else []:
        trace = load_trace(path)
        for num_ranks in args.ranks:
            for tokens in args.batch_tokens:
                loads = [layer for batch in batches(trace, tokens, num_ranks) for layer in batch]
                yield Cases(f"{path.stem} {tokens} tokens", loads)


def zipf_cases(args: argparse.Namespace) -> Iterator[Cases]:
    """Skewed popularity in random order, drawn anew for every case."""
    rng = np.random.default_rng(0)
    for num_ranks, num_experts in ZIPF_SIZES:
        for wanted in ZIPF_IMBALANCES if num_ranks > 2 else (1.6, 1.9):
            loads = [
                zipf_loads(rng, num_ranks, num_experts, wanted) for _ in range(args.zipf_cases)
            ]
            yield Cases(f"zipf {wanted}", loads)


def zipf_loads(
    rng: np.random.Generator, num_ranks: int, num_experts: int, wanted: float
) -> np.ndarray:
    """Loads int32 (R, E) with an imbalance near ``wanted``; two ranks keep hot experts together."""
    order = rng.permutation(num_experts) if num_ranks > 2 else np.arange(num_experts)
    candidates = []
    for exponent in np.linspace(0, 2, 41):
        weight = ((1.0 + np.arange(num_experts)) ** -exponent)[order]
        weight /= weight.sum()
        distance = abs(imbalance_of(weight, num_ranks) - wanted)
        candidates.append((distance, exponent, weight))
    weight = min(candidates, key=lambda candidate: candidate[:2])[2]
    return rng.multinomial(TOKENS_PER_RANK * TOP_K, weight, size=num_ranks).astype(np.int32)


def imbalance_of(expert_load: np.ndarray, num_ranks: int) -> float:
    """Imbalance on masters of a load or weight (E,)."""
    rank_load = expert_load.reshape(num_ranks, -1).sum(1)
    return float(rank_load.max() / rank_load.mean())


def measure(cases: Cases, num_slots: int, repeat: int) -> dict[str, Any]:
    """Plan every case, the first time not timed; means over cases unless named otherwise."""
    num_ranks, num_experts = cases.loads[0].shape
    shape = ExpertShape(num_ranks, num_experts, num_slots)
    warm_up(shape)
    before, after, senders, replicas, seconds = [], [], [], [], []
    for loads in cases.loads:
        plan = plan_quota(loads, shape, 0)
        for _ in range(repeat):
            start = time.perf_counter()
            plan_quota(loads, shape, 0)
            seconds.append(time.perf_counter() - start)
        masters = plan.slot_expert[plan.slot_expert >= 0] // shape.num_masters
        before.append(imbalance_of(loads.sum(0), shape.num_ranks))
        after.append(imbalance(plan.quota.sum(0)))
        senders.append(np.bincount(masters, minlength=1).max())
        replicas.append(masters.size)
    return {
        "name": cases.name,
        "num_ranks": num_ranks,
        "num_experts": num_experts,
        "num_slots": num_slots,
        "cases": len(cases.loads),
        "before": float(np.mean(before)),  # imbalance on masters
        "after": float(np.mean(after)),
        "worst_after": max(after),
        "busiest_sender": float(np.mean(senders)),  # replicas sent by the rank that sends most
        "replicas": float(np.mean(replicas)),
        "median_microseconds": float(np.median(seconds)) * 1e6,  # a plan, one rank's share
    }


if __name__ == "__main__":
    main()
