"""Random batches through real balancers on 2, 4 and 8 processes, every answer checked.

    python benchmarks/random_batches.py --json benchmarks/results/random_batches.json

Sizes and loads are random: tiny and empty batches, padding, skews from none to one hot expert,
and impossible ids now and then; policies and speeds of ranks change meanwhile. Slots are poisoned
with NaN after each layer's computation, so a kernel that reads a slot too early or too late gives a
wrong answer. Weights are small integers: every sum is exact, so the outputs must be the same bits
as without balancing. Exits with 1 if any answer was wrong or the ranks disagreed.

Batches come in portions, each with a seed and processes of its own, and what is known is written
after each: ``--resume`` goes on where the JSON ends, with other numbers of batches if asked to.
"""

import argparse
import json
import sys
from collections import Counter
from typing import Any

import harness
import numpy as np

from tests.support.moe import TinyMoE
from tests.support.ranks import fresh_run_path, run_ranks
from tests.support.stress import RandomBatches, StressReport, run_stress
from ultraep_serve.config import BalanceConfig
from ultraep_serve.types import ExpertShape, Policy, SpeedSource, TokenView


def main() -> int:
    """Print the table; write it with the machine and the command to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, default=1000, help="per set-up, of 3 layers each")
    parser.add_argument("--portion", type=int, default=5000, help="batches of one seed")
    parser.add_argument("--max-tokens", type=int, default=256, help="of one source of tokens")
    parser.add_argument("--relay", default="always", help="auto, always or never")
    parser.add_argument("--resume", action="store_true", help="add to what --json holds")
    args = parser.parse_args()
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    if args.resume:
        found = json.loads(args.json.read_text())["results"]
        rows = {(row["num_ranks"], row["view"]): row for row in found}
    print(f"{'ranks':>5} {'view':>7} {'batches':>7} {'planned':>7} {'skipped':>7} {'error':>8} "
          f"{'corrupt':>7} {'before':>11} {'after':>13} {'seconds':>7}")  # fmt: skip
    for num_ranks in args.ranks:
        for view in TokenView:
            key = num_ranks, view.value
            while (done := rows[key]["batches"] if key in rows else 0) < args.batches:
                new = measure(num_ranks, view, min(args.portion, args.batches - done), done, args)
                rows[key] = joined(rows[key], new) if key in rows else new
                print_row(rows[key])
                harness.write(args.json, {"results": list(rows.values())})
    return 0 if all(map(is_right, rows.values())) else 1


def measure(
    num_ranks: int, view: TokenView, num_batches: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run one portion of one set-up; imbalances are of time, of the planned layers."""
    batches = RandomBatches(
        model=TinyMoE(ExpertShape(num_ranks, 7 * num_ranks, 2), hidden=32, inner=80),
        view=view,
        config=BalanceConfig(
            min_batch_tokens=32,
            speeds=",".join(["1.0", *["0.8", "0.6"] * num_ranks][:num_ranks]),
        ),
        num_batches=num_batches,
        relay=args.relay,
        max_tokens=args.max_tokens,
        policies=(*[Policy.QUOTA] * 3, Policy.OFF),
        speeds=tuple(SpeedSource),
        bad_id_rate=0.01,
        seed=seed,
    )
    with fresh_run_path() as run_path:
        reports: list[StressReport] = run_ranks(
            run_stress, num_ranks, run_path, batches, timeout_seconds=3600 + 2 * num_batches
        )
    first = reports[0]
    return {
        "num_ranks": num_ranks,
        "view": view.value,
        "batches": num_batches,
        "layers_by_decision": first.counts(),
        "ranks_agree": all(report.decisions == first.decisions for report in reports),
        "corrupt_slots": sum(report.corrupt_slots for report in reports),
        "inexact_layers": sum(report.inexact for report in reports),
        "worst_relative_error": max(report.worst_error for report in reports),
        "mean_before": float(np.mean(first.before)),
        "max_before": max(first.before),
        "mean_after": float(np.mean(first.after)),
        "max_after": max(first.after),
        "bytes_sent": sum(report.bytes_sent for report in reports),
        "seconds": first.seconds,
    }


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both portions of a set-up; means by how many layers were planned."""
    counts = Counter(one["layers_by_decision"]) + Counter(other["layers_by_decision"])
    planned = [row["layers_by_decision"].get("planned", 0) for row in (one, other)]
    added = ("batches", "corrupt_slots", "inexact_layers", "bytes_sent", "seconds")
    largest = ("worst_relative_error", "max_before", "max_after")
    means = ("mean_before", "mean_after")
    return {
        **one,
        "layers_by_decision": dict(counts),
        "ranks_agree": one["ranks_agree"] and other["ranks_agree"],
        **{name: one[name] + other[name] for name in added},
        **{name: max(one[name], other[name]) for name in largest},
        **{name: float(np.average([one[name], other[name]], weights=planned)) for name in means},
    }


def is_right(row: dict[str, Any]) -> bool:
    """Whether ranks agreed and every answer was exact."""
    wrong = row["corrupt_slots"] or row["inexact_layers"] or row["worst_relative_error"]
    return bool(row["ranks_agree"] and not wrong)


def print_row(row: dict[str, Any]) -> None:
    planned = row["layers_by_decision"].get("planned", 0)
    skipped = sum(row["layers_by_decision"].values()) - planned
    print(
        "{num_ranks:5} {view:>7} {batches:7} {planned:7} {skipped:7} {worst_relative_error:8.1e} "
        "{corrupt_slots:7} {mean_before:5.2f} <{max_before:4.1f} {mean_after:6.3f} "
        "<{max_after:5.2f} {seconds:7.1f}".format(**row, planned=planned, skipped=skipped),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
