"""The quota planner against what is possible: the exact optimum, domains' floors, plain greedy.

    python benchmarks/planner_bounds.py --traces DIR --json benchmarks/results/planner_bounds.json

Loads and speeds as in planner_quality.py: real traces if given, and Zipf-like ones. The optimum is
a mixed-integer program (HiGHS) and takes seconds a case, so only 64 experts on 8 ranks are solved.
Domains and the plain greedy are looked at with equal speeds.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from planner_quality import Cases, trace_cases, zipf_cases

from tests.support.references import greedy_plan, least_largest_load
from ultraep_serve.costs.model import transfer_of
from ultraep_serve.plan.checks import imbalance_floor
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape, imbalance

BALANCED = 0.005  # imbalances closer than this count as the same balance


def main() -> None:
    """Print three tables; write them with the machine and the command to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, help="directory of .npz traces (default: none)")
    parser.add_argument("--zipf-cases", type=int, default=5, help="per size and imbalance")
    tables = {table.__name__: table for table in (optimum, domains, greedy)}
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    parser.add_argument("--slots", type=int, nargs="+", default=[1], help="of the optimum")
    parser.add_argument("--slowest", type=float, default=1.0, metavar="X", help="of the optimum")
    args = parser.parse_args()
    args.batch_tokens = [2048]
    harness.write(args.json, {name: tables[name](args) for name in args.tables})


def cases(args: argparse.Namespace, ranks: list[int]) -> Iterator[Cases]:
    """Traces over ``ranks`` that divide their experts, and synthetic loads that have as many."""
    args.ranks = [num_ranks for num_ranks in ranks if 64 % num_ranks == 0]
    yield from trace_cases(args)
    for case in zipf_cases(args.zipf_cases):
        if case.loads[0].shape[0] in ranks:
            yield case


def optimum(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Imbalance above the least possible, 8 ranks."""
    args.ranks = [8]
    rows = []
    for case in trace_cases(args):
        for num_slots in args.slots:
            gaps, bests, reached = [], [], []
            for loads, speeds in zip(case.loads, case.speeds, strict=True):
                least = least_largest_load(loads.sum(0), 8, num_slots, speeds=speeds)
                best, bound = (time * speeds.sum() / loads.sum() for time in least)
                ours = after(loads, num_slots, speeds=speeds)
                gaps.append(ours - bound)
                bests.append(best)
                reached.append(ours)
            figures = {
                "after": spread(reached),
                "optimum": spread(bests),
                "gap_to_lower_bound": spread(gaps),
            }
            rows.append(row("optimum", case, num_slots, figures))
    return rows


def domains(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Imbalance over each case's floor, the largest domain mean, where domains are smaller."""
    rows = []
    for case in cases(args, [16, 32, 64]):
        for domain_size, num_slots in ((8, 2), (8, 1)):
            context = PlanContext.of(ExpertShape(*case.loads[0].shape, num_slots), domain_size)
            floors = [imbalance_floor(loads, context) for loads in case.loads]
            reached = [after(loads, num_slots, domain_size) for loads in case.loads]
            figures = {
                "domain_size": domain_size,
                "floor": spread(floors),
                "after": spread(reached),
                "over_floor": spread([a / f for a, f in zip(reached, floors, strict=True)]),
            }
            rows.append(row("domains", case, num_slots, figures))
    return rows


def greedy(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Balance and replicas beside the plain greedy rule's."""
    rows = []
    for case in cases(args, [8, 16, 32, 64, 72]):
        num_ranks, num_experts = case.loads[0].shape
        for num_slots in (2, 1):
            worse, more, ours, theirs, same = 0, [], [], [], []
            for loads in case.loads[:40]:
                plan = plan_quota(
                    loads, PlanContext.of(ExpertShape(num_ranks, num_experts, num_slots)), 0
                )
                slots, load = greedy_plan(loads.sum(0), num_ranks, num_slots)
                ours.append(imbalance(plan.quota.sum(0)))
                theirs.append(imbalance(load))
                worse += ours[-1] > theirs[-1] + 1 / 256
                if abs(ours[-1] - theirs[-1]) <= BALANCED:
                    same.append(((plan.slot_expert >= 0).sum(), (slots >= 0).sum()))
                    if same[-1][0] > same[-1][1]:
                        masters = num_experts // num_ranks
                        more.append((sender(plan.slot_expert, masters), sender(slots, masters)))
            replicas = np.sum(same, axis=0) if same else (0, 0)
            figures = {
                "cases": len(ours),
                "after": spread(ours),
                "greedy_after": spread(theirs),
                "worse_than_greedy": int(worse),
                "equally_balanced": len(same),
                "replicas_over_greedys_there": float(replicas[0] / replicas[1])
                if replicas[1]
                else None,
                "more_replicas_than_greedy": len(more),
                "of_these_greedy_has_a_busier_sender": sum(own < other for own, other in more),
            }
            rows.append(row("greedy", case, num_slots, figures))
    return rows


def row(table: str, case: Cases, num_slots: int, figures: dict[str, Any]) -> dict[str, Any]:
    """One row, printed as soon as it is known."""
    num_ranks, num_experts = case.loads[0].shape
    sizes = {"name": case.name, "ranks": num_ranks, "experts": num_experts, "slots": num_slots}
    made = {**sizes, "cases": len(case.loads), **figures}
    print(table, made, flush=True)
    return made


def after(
    loads: np.ndarray,
    num_slots: int,
    domain_size: int | None = None,
    speeds: np.ndarray | None = None,
) -> float:
    """Imbalance that the quota planner leaves of ``loads`` (R, E), with ``speeds`` (R,) of time."""
    shape = ExpertShape(*loads.shape, num_slots)
    plan = plan_quota(loads, PlanContext.of(shape, domain_size, speeds), 0)
    return imbalance(plan.quota.sum(0), speeds)


def sender(slot_expert: np.ndarray, num_masters: int) -> int:
    """Replicas sent by the rank that sends most."""
    return transfer_of(slot_expert, num_masters).busiest_sender


def spread(values: list[float]) -> dict[str, float]:
    """Mean and largest."""
    return {"mean": float(np.mean(values)), "max": float(np.max(values))}


if __name__ == "__main__":
    main()
