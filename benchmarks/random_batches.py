"""Random batches through real balancers on 2, 4 and 8 processes, every answer checked.

    python benchmarks/random_batches.py --json benchmarks/results/random_batches.json

Sizes and loads are random: tiny and empty batches, padding, skews from none to one hot expert,
and impossible ids now and then; policies change meanwhile, and ranks are not equally fast. Slots
are poisoned with NaN after each layer's computation; with ``--slot-memory per_layer`` now and then,
when the rank also has all forget what has stayed. So a kernel that reads a slot too early or too
late gives a wrong answer. Weights are small integers: every sum is exact, so the outputs must be
the same bits as without balancing. Exits with 1 if any answer was wrong or the ranks disagreed.
"""

import argparse
import sys
from typing import Any

import harness
import numpy as np

from tests.support.ranks import fresh_run_path, run_ranks
from tests.support.stress import RandomBatches, StressReport, TinyMoE, run_stress
from ultraep_serve.config import BalanceConfig
from ultraep_serve.types import ExpertShape, Policy, TokenView


def main() -> int:
    """Print the rows; write them with the machine and the command to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, default=1000, help="per set-up, of 3 layers each")
    parser.add_argument("--max-tokens", type=int, default=256, help="of one source of tokens")
    parser.add_argument("--slot-memory", default="shared", help="shared or per_layer")
    parser.add_argument("--relay", default="always", help="auto, always or never")
    args = parser.parse_args()
    rows = []
    for num_ranks in args.ranks:
        for view in TokenView:
            rows.append(measure(num_ranks, view, args))
            print(rows[-1], flush=True)
            harness.write(args.json, {"results": rows})
    return 0 if all(map(is_right, rows)) else 1


def measure(num_ranks: int, view: TokenView, args: argparse.Namespace) -> dict[str, Any]:
    """Run one set-up; imbalances are of time, of the planned layers."""
    batches = RandomBatches(
        model=TinyMoE(ExpertShape(num_ranks, 7 * num_ranks, 2), hidden=32, inner=80),
        view=view,
        config=BalanceConfig(
            min_batch_tokens=32,
            slot_memory=args.slot_memory,
            speeds=",".join(["1.0", *["0.8", "0.6"] * num_ranks][:num_ranks]),
        ),
        num_batches=args.batches,
        relay=args.relay,
        max_tokens=args.max_tokens,
        policies=(*[Policy.QUOTA] * 3, Policy.OFF),
        bad_id_rate=0.01,
    )
    with fresh_run_path() as run_path:
        reports: list[StressReport] = run_ranks(
            run_stress, num_ranks, run_path, batches, timeout_seconds=3600 + 2 * args.batches
        )
    first = reports[0]
    return {
        "num_ranks": num_ranks,
        "view": view.value,
        "slot_memory": args.slot_memory,
        "batches": args.batches,
        "layers_by_decision": first.counts(),
        "ranks_agree": all(report.decisions == first.decisions for report in reports),
        "corrupt_slots": sum(report.corrupt_slots for report in reports),
        "inexact_layers": sum(report.inexact for report in reports),
        "mean_before": float(np.mean(first.before)),
        "max_before": max(first.before),
        "mean_after": float(np.mean(first.after)),
        "max_after": max(first.after),
        "bytes_sent": sum(report.bytes_sent for report in reports),
        "kept_replicas": first.kept,
        "seconds": first.seconds,
    }


def is_right(row: dict[str, Any]) -> bool:
    """Whether ranks agreed and every answer was exact."""
    return bool(row["ranks_agree"] and not (row["corrupt_slots"] or row["inexact_layers"]))


if __name__ == "__main__":
    sys.exit(main())
