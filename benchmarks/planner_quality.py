"""How well and how fast the quota planner balances: Zipf-like loads, and real traces if given.

    python benchmarks/planner_quality.py --traces DIR --json benchmarks/results/planner_quality.json

Every layer of every batch of a trace is one case, its tokens split evenly over the source ranks.
Zipf cases have 1024 tokens per rank, with the given exponents, or those that meet an imbalance.
With --slowest ranks are not equally fast, and imbalances are of time: the busiest rank's over the
fractional optimum, all ranks' loads over all ranks' speeds. Every case draws its speeds. Rows are
timed in turn, so that all of them see the same machine.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.host.speeds import full_speeds, whole_speeds

from ultraep_lab.store import load_trace
from ultraep_lab.trace import batches
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota, warm_up
from ultraep_serve.types import ExpertShape, imbalance

ZIPF_SIZES = ((2, 16, 8), (8, 128, 8), (32, 128, 8), (64, 256, 8), (64, 512, 8), (72, 504, 8))
ZIPF_IMBALANCES = (1.5, 2.0, 3.0, 4.0)
TOKENS_PER_RANK = 1024
Size = tuple[int, ...]  # R, E and experts per token


@dataclass(frozen=True)
class Cases:
    """One row of the table."""

    name: str
    loads: list[np.ndarray]  # each (R, E)
    speeds: list[np.ndarray]  # each (R,)


def main() -> None:
    """Print the rows; write them with the machine and the command to --json."""
    args = parse_arguments()
    zipf = zipf_cases(args.zipf_cases, args.sizes, args.exponents, args.slowest)
    chosen = [(c, num_slots) for c in (*trace_cases(args), *zipf) for num_slots in args.slots]
    rows = [judge(cases, num_slots) for cases, num_slots in chosen]
    seconds: list[list[float]] = [[] for _ in chosen]
    for _ in range(args.repeat):
        for spent, (cases, num_slots) in zip(seconds, chosen, strict=True):
            spent += time_plans(cases, num_slots)
    for row, spent in zip(rows, seconds, strict=True):
        row["median_microseconds"] = float(np.median(spent)) * 1e6  # a plan, one rank's share
        print(row)
    harness.write(args.json, {"rows": rows})


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, help="directory of .npz traces (default: none)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32], help="for traces")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 1], help="slots per rank")
    parser.add_argument("--zipf-cases", type=int, default=20, help="per size and skew")
    parser.add_argument("--sizes", type=size, nargs="+", default=ZIPF_SIZES, metavar="R,E,K")
    parser.add_argument("--exponents", type=float, nargs="+", default=(), help="of Zipf loads")
    speeds = "speeds are drawn from X to 1 (default: all ranks equally fast)"
    parser.add_argument("--slowest", type=float, default=1.0, metavar="X", help=speeds)
    parser.add_argument("--repeat", type=int, default=3, help="timed plans per case")
    return parser.parse_args()


def trace_cases(args: argparse.Namespace) -> Iterator[Cases]:
    """Every layer of every whole batch of each trace."""
    for path in sorted(args.traces.glob("*.npz")) if args.traces else []:
        trace = load_trace(path)
        for num_ranks in args.ranks:
            for tokens in args.batch_tokens:
                loads = [layer for batch in batches(trace, tokens, num_ranks) for layer in batch]
                yield cases_of(f"{path.stem} {tokens} tokens", loads, args.slowest)


def cases_of(name: str, loads: list[np.ndarray], slowest: float) -> Cases:
    """``loads`` with speeds drawn from ``slowest`` to 1, the same in every run."""
    num_ranks, rng = loads[0].shape[0], np.random.default_rng(1)
    if slowest == 1:
        return Cases(name, loads, [full_speeds(num_ranks)] * len(loads))
    return Cases(name, loads, [whole_speeds(rng.uniform(slowest, 1, num_ranks)) for _ in loads])


def size(text: str) -> Size:
    """``R,E,K`` of a command line."""
    ranks, experts, top_k = (int(number) for number in text.split(","))
    return ranks, experts, top_k


def zipf_cases(
    count: int,
    sizes: Sequence[Size] = ZIPF_SIZES,
    exponents: Sequence[float] = (),
    slowest: float = 1.0,
) -> Iterator[Cases]:
    """Skewed popularity in random order, drawn anew for each of ``count`` loads."""
    rng = np.random.default_rng(0)
    for num_ranks, num_experts, top_k in sizes:
        for exponent in exponents:
            loads = [
                draw(rng, num_ranks, top_k, zipf(rng.permutation(num_experts), exponent))
                for _ in range(count)
            ]
            yield cases_of(f"zipf exponent {exponent}", loads, slowest)
        if exponents:
            continue
        for wanted in ZIPF_IMBALANCES if num_ranks > 2 else (1.6, 1.9):
            loads = [
                draw(rng, num_ranks, top_k, weight_of(rng, num_ranks, num_experts, wanted))
                for _ in range(count)
            ]
            yield cases_of(f"zipf {wanted}", loads, slowest)


def draw(rng: np.random.Generator, num_ranks: int, top_k: int, weight: np.ndarray) -> np.ndarray:
    """Loads int32 (R, E) of experts with ``weight`` (E,)."""
    return rng.multinomial(TOKENS_PER_RANK * top_k, weight, size=num_ranks).astype(np.int32)


def zipf(order: np.ndarray, exponent: float) -> np.ndarray:
    """Weights (E,) that sum to 1; ``order`` (E,) says which expert is the n-th hottest."""
    weight: np.ndarray = ((1.0 + np.arange(order.size)) ** -exponent)[order]
    return weight / weight.sum()


def weight_of(
    rng: np.random.Generator, num_ranks: int, num_experts: int, wanted: float
) -> np.ndarray:
    """Weights (E,) with an imbalance near ``wanted``; two ranks keep hot experts together."""
    order = rng.permutation(num_experts) if num_ranks > 2 else np.arange(num_experts)
    weights = [zipf(order, exponent) for exponent in np.linspace(0, 2, 41)]
    return min(weights, key=lambda weight: abs(imbalance_of(weight, num_ranks) - wanted))


def imbalance_of(expert_load: np.ndarray, num_ranks: int) -> float:
    """Imbalance on masters of a load or weight (E,)."""
    rank_load = expert_load.reshape(num_ranks, -1).sum(1)
    return float(rank_load.max() / rank_load.mean())


def judge(cases: Cases, num_slots: int) -> dict[str, Any]:
    """How well every case is balanced; means over cases unless named otherwise."""
    shape = shape_of(cases, num_slots)
    before, after, by_count, senders, replicas = [], [], [], [], []
    for loads, speeds in zip(cases.loads, cases.speeds, strict=True):
        plan = plan_quota(loads, PlanContext.of(shape, speeds=speeds), 0)
        masters = plan.slot_expert[plan.slot_expert >= 0] // shape.num_masters
        before.append(imbalance(loads.sum(0).reshape(shape.num_ranks, -1).sum(1), speeds))
        after.append(imbalance(plan.quota.sum(0), speeds))
        by_count.append(imbalance(plan_quota(loads, PlanContext.of(shape), 0).quota.sum(0), speeds))
        senders.append(np.bincount(masters, minlength=1).max())
        replicas.append(masters.size)
    return {
        "name": cases.name,
        "num_ranks": shape.num_ranks,
        "num_experts": shape.num_logical_experts,
        "num_slots": num_slots,
        "cases": len(cases.loads),
        "before": float(np.mean(before)),  # imbalance on masters
        "after": float(np.mean(after)),
        "worst_after": max(after),
        "by_count_after": float(np.mean(by_count)),  # of a plan that evens out counts
        "busiest_sender": float(np.mean(senders)),  # replicas sent by the rank that sends most
        "replicas": float(np.mean(replicas)),
    }


def time_plans(cases: Cases, num_slots: int) -> list[float]:
    """Seconds that every case's plan takes, the loads behind headers as exchanges bring them."""
    shape = shape_of(cases, num_slots)
    warm_up(shape)
    seconds = []
    for case, speeds in zip(cases.loads, cases.speeds, strict=True):
        rows = np.pad(case.astype(np.int64), ((0, 0), (HEADER_WIDTH, 0)))
        loads = rows[:, HEADER_WIDTH:]
        start = time.perf_counter()
        plan_quota(loads, PlanContext.of(shape, speeds=speeds), 0)
        seconds.append(time.perf_counter() - start)
    return seconds


def shape_of(cases: Cases, num_slots: int) -> ExpertShape:
    """Sizes of a plan with ``num_slots`` slots per rank."""
    return ExpertShape(*cases.loads[0].shape, num_slots)


if __name__ == "__main__":
    main()
