"""What a plan costs a GPU, counted without one: instructions of its programs, executed as compiled.

    python benchmarks/plan_steps.py --json benchmarks/results/plan-steps.json

The compiled kernel is executed by ``tests/ptx`` for made-up loads, one program at a time, so none
waits. Its critical path is a program that adds up loads, and surveys them as the last one; the
attempt with most instructions, and what the last one does more to take the best; and the slowest
program that writes the plan. Every plan is compared with the CPU's. Registers and spills are what
ptxas reports for sm_90.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch

sys.path.append(str(Path(__file__).parent / "device"))

from routes import make_routes

from tests.ptx.alone import Planned, plan_alone
from tests.ptx.machine import Options
from tests.support.kernel_checks import require_same_plan
from tests.support.offline import compile_launch
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

TOKENS, TOP_K = 8192, 8
IN_TURN = Options(resident=1, order=1, checks_races=False)


@dataclass(frozen=True)
class Case:
    """Sizes and the imbalance of the loads."""

    shape: ExpertShape
    imbalance: float


CASES = [
    Case(ExpertShape(ranks, experts, slots), imbalance)
    for ranks, experts, slots in (
        (8, 128, 2), (32, 256, 2), (64, 256, 2), (72, 288, 2), (72, 504, 2), (72, 504, 4),
        (64, 896, 2),
    )
    for imbalance in ((1.5, 2.0, 3.0) if (ranks, experts) == (64, 256) else (2.0,))
]  # fmt: skip


def main() -> None:
    """Print the table, and write it to --json."""
    args = harness.parser(__doc__).parse_args()
    rows = []
    print(f"{'ranks':>5} {'experts':>7} {'slots':>5} {'imbalance':>9} {'copies':>6} {'survey':>6} "
          f"{'attempt':>7} {'winners':>7} {'slots':>6} {'expert':>6} {'path':>6} {'registers':>9} "
          f"{'spilled':>7}")  # fmt: skip
    for case in CASES:
        shape = case.shape
        routes = make_routes(shape, TOKENS, TOP_K, case.imbalance, torch.device("cpu"))
        planned = plan_alone(torch.from_numpy(routes.loads).int(), shape.num_replica_slots, IN_TURN)
        twin = plan_quota(routes.loads, PlanContext.of(shape), 0)
        require_same_plan(planned.found, twin)
        rows.append(row_of(case, planned))
        print(" ".join(f"{value:>{width}}" for value, width in zip(
            rows[-1].values(), (5, 7, 5, 9, 6, 6, 7, 7, 6, 6, 6, 9, 7), strict=True
        )), flush=True)  # fmt: skip
    harness.write(args.json, {"rows": rows})


def row_of(case: Case, planned: Planned) -> dict[str, Any]:
    """Instructions of the programs on the critical path, each and together."""
    sizes, steps, shape = planned.sizes, planned.steps, case.shape
    first_wave = sizes.num_sums + sizes.search.first + sizes.search.thrifty
    attempts = steps[sizes.num_sums : first_wave]
    finished = steps[sizes.num_programs - sizes.num_finished :]
    slowest = max(attempts[:-1])
    facts = compile_launch(planned.launch, 90)
    figures = {
        "survey": steps[sizes.num_sums - 1],
        "attempt": slowest,
        "winners": max(0, attempts[-1] - slowest),
        "slots_written": finished[0],
        "expert_written": max(finished[1:]),
    }
    on_path = figures["survey"], slowest, figures["winners"], max(finished)
    return {
        "ranks": shape.num_ranks,
        "experts": shape.num_logical_experts,
        "slots": shape.num_replica_slots,
        "imbalance": case.imbalance,
        "copies": int((planned.found.slot_expert >= 0).sum()),
        **figures,
        "path": sum(on_path),
        "registers": facts.registers,
        "spilled": facts.spill_bytes,
    }


if __name__ == "__main__":
    main()
