"""The workload changes from law to intent: how soon each policy follows.

    python benchmarks/domain_switch.py --traces DIR --json benchmarks/results/domain_switch.json

Both traces are of one model, one after the other, in whole batches. ``eplb`` and ``lplb`` place
experts by the batches before, here anew before every batch, which no deployment does; ``quota``
sees the batch that it plans. The first batch has no past: it is history only, and not shown.
Figures are means over layers of max/mean assignments over ranks; 1.0 is perfect.
"""

import argparse
from pathlib import Path
from typing import Any

import harness
import numpy as np

from ultraep_serve.lab.comparators import policy_function
from ultraep_serve.lab.replay import Replay, replay
from ultraep_serve.lab.replay_options import ReplayOptions
from ultraep_serve.lab.store import load_trace
from ultraep_serve.lab.trace import Trace, concatenate

POLICIES = ("off", "eplb", "lplb", "quota")
NUM_EXPERTS = 64


def main() -> None:
    """Replay every setting, print a table of each, write the JSON."""
    args = parse_arguments()
    parts = [whole_batches(args.traces / f"{name}.npz", args.batch_tokens) for name in args.order]
    trace = concatenate(parts)
    names = [
        name
        for name, part in zip(args.order, parts, strict=True)
        for _ in range(part.num_tokens // args.batch_tokens)
    ]
    settings = []
    for num_ranks in args.ranks:
        options = ReplayOptions(
            num_ranks=num_ranks,
            num_slots=args.slots,
            batch_tokens=args.batch_tokens,
            history_batches=args.history,
            skip=1,
        )
        result = replay(trace, options, [policy_function(name) for name in POLICIES])
        rows = batch_rows(result, names)
        settings.append({"ep": num_ranks, "slots": args.slots, "batches": rows})
        print_table(num_ranks, args, rows)
    sizes = {"batch_tokens": args.batch_tokens, "history_batches": args.history}
    harness.write(args.json, {**sizes, "settings": settings})


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the two traces")
    parser.add_argument("--order", nargs="+", default=["law", "intent"], help="file names in turn")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--history", type=int, default=8, help="past batches that eplb sees")
    return parser.parse_args()


def whole_batches(path: Path, batch_tokens: int) -> Trace:
    """The trace without what is left after its last whole batch, so that batches do not mix."""
    trace = load_trace(path, num_experts=NUM_EXPERTS)
    assert isinstance(trace, Trace)
    kept = trace.num_tokens // batch_tokens * batch_tokens
    ends = np.minimum(np.cumsum(trace.sequence_lengths), kept)
    lengths = np.diff(ends, prepend=0)
    return Trace(trace.topk_ids[:kept], lengths[lengths > 0], trace.num_experts)


def batch_rows(result: Replay, names: list[str]) -> list[dict[str, Any]]:
    """One row per batch: its workload, and the mean over layers of each policy's imbalance."""
    batch = np.array([index for index, _ in result.cases])
    rows = []
    for index in dict.fromkeys(batch.tolist()):
        at = batch == index
        row = {"batch": index, "workload": names[index], "previous": names[index - 1]}
        for name, outcome in result.policies.items():
            row[name] = float(np.array(outcome.imbalance_after)[at].mean())
        rows.append(row)
    return rows


def print_table(num_ranks: int, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Rows of one setting, the batch after the switch marked."""
    print(f"\nEP{num_ranks}, {args.slots} slots, batches of {args.batch_tokens} tokens")
    print(f"{'batch':>5} {'workload':10}" + "".join(f"{name:>8}" for name in POLICIES))
    for row in rows:
        mark = "  <- switch" if row["workload"] != row["previous"] else ""
        figures = "".join(f"{row[name]:8.3f}" for name in POLICIES)
        print(f"{row['batch']:5} {row['workload']:10}{figures}{mark}")


if __name__ == "__main__":
    main()
