"""`ultraep-serve replay`: what each policy would have made of a recorded workload."""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ultraep_serve.cli.arguments import (
    add_json_argument,
    built,
    names,
    prepare_outputs,
    show,
    speeds,
)
from ultraep_serve.errors import ConfigError, PlanError
from ultraep_serve.lab.comparators import POLICIES, policy_function
from ultraep_serve.lab.replay import ReplayOptions, replay
from ultraep_serve.lab.replay_output import replay_document, write_plans
from ultraep_serve.lab.store import load_trace
from ultraep_serve.lab.trace import DECODE, PREFILL, of_phase

__all__ = ["add_arguments", "run"]

MOST_LAYERS = 10_000  # no model has more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags; those of ``ReplayOptions`` are stored under the names of its fields."""
    parser.description = (
        "Plan every layer of every batch of a trace with each policy, and compare. No server and "
        "no GPU is needed."
    )
    traces = "recorded trace: .npz, or .parquet of loads"
    parser.add_argument("trace", type=Path, metavar="TRACE", help=traces)
    summaries = "; ".join(f"{policy.name}: {policy.summary}" for policy in POLICIES.values())
    parser.add_argument(
        "--policies", "--policy", type=names, action="extend", metavar="NAME,...", required=True,
        help=f"policies to compare; may be repeated. {summaries}",
    )  # fmt: skip
    layers = "MoE layers, as in 0 3 6-8 (default: all)"
    parser.add_argument("--layers", nargs="+", metavar="N", help=layers)
    parser.add_argument(
        "--phase", choices=("prefill", "decode", "all"), default="prefill",
        help="what to replay, where the trace has phases",
    )  # fmt: skip
    ep = "ranks of the expert-parallel group"
    parser.add_argument("--ep", dest="num_ranks", type=int, metavar="N", required=True, help=ep)
    tokens = "tokens per batch over all ranks; a trace of loads has its own batches"
    parser.add_argument("--batch-tokens", type=int, metavar="N", help=tokens)
    for flag, field, default, text in (
        ("--slots", "num_slots", 2, "replica slots per rank"),
        ("--domain-size", "domain_size", None, "ranks per domain (default: all)"),
        ("--experts", "num_experts", None, "experts of the model, if the trace does not say"),
        ("--limit", "limit", None, "replay at most N batches"),
        ("--history", "history_batches", 8, "past batches that eplb, eplb-slots and lplb see"),
        ("--rebalance-every", "rebalance_every", 1, "batches between updates of what they see"),
        ("--skip", "skip", 0, "first batches, used as history only"),
    ):
        parser.add_argument(flag, dest=field, type=int, metavar="N", default=default, help=text)
    parser.add_argument(
        "--speeds", type=speeds, metavar="equal|X,...",
        help="how fast ranks are, one number each like 1.0,0.6 (default: as the trace says, or "
        "equal)",
    )  # fmt: skip
    add_json_argument(parser)
    parser.add_argument(
        "--dump-plans", type=Path, metavar="FILE",
        help="write the plans of one policy, which leaves masters in place, to FILE (.npz)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Replay, write the files, print a table; 1 where a policy makes a plan that breaks a rule.

    Raises UltraEPError with what to do.
    """
    if not arguments.policies:
        raise ConfigError("--policies names no policy")
    policies = [policy_function(name) for name in dict.fromkeys(arguments.policies)]
    arguments.layers = None if arguments.layers is None else _layers(arguments.layers)
    options = built(ReplayOptions, arguments)
    prepare_outputs(arguments.json, arguments.dump_plans)
    trace = load_trace(arguments.trace, num_experts=arguments.num_experts)
    if arguments.phase != "all":
        trace = of_phase(trace, PREFILL if arguments.phase == "prefill" else DECODE)
    try:
        result = replay(trace, options, policies, keep_plans=arguments.dump_plans is not None)
    except PlanError as error:
        print(f"ultraep-serve: error: {error}", file=sys.stderr)
        return 1
    document = replay_document(result, options, arguments.trace.name)
    if result.plans is not None:
        write_plans(arguments.dump_plans, result.plans)
    show(document, _view(document), arguments.json)
    return 0


def _layers(words: list[str]) -> tuple[int, ...]:
    layers: list[int] = []
    for word in ",".join(words).split(","):
        first, dash, last = word.strip().partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            span = range(0)
        if not 0 < len(span) <= MOST_LAYERS:
            raise ConfigError(f"--layers {word!r} must be as in 0 3 6-8")
        layers += span
    return tuple(layers)


def _view(document: dict[str, Any]) -> RenderableType:
    """The document as a table for a terminal of 80 characters."""
    by_time = "speeds" in document
    kind = "time_" if by_time else ""
    first = next(iter(document["policies"].values()))[f"{kind}imbalance_before"]
    trace = document["trace"]
    head = Text(f"{trace['file']}: EP{document['ep']}, {document['slots']} slots, ")
    head.append(f"{document['batches']} batches of {trace['layers']} layers\n")
    if by_time:
        head.append(f"speeds {', '.join(f'{speed:.2g}' for speed in document['speeds'])}\n")
    head.append(f"busiest rank over mean{' of time' * by_time} without balancing: ")
    head.append(f"{first['mean']:.3f} (worst {first['max']:.3f})")
    if "floor" in document:
        floor = document[f"{kind}floor"]
        head.append(f"\nlowest possible in domains of {trace['domain']} ranks: {floor['mean']:.3f}")
        head.append(f" (worst {floor['max']:.3f})")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    second = "counts" if by_time else "p50"  # the mean of assignments, where the rest is of time
    for name in ("mean", second, "p99", "worst", "copies", "slots", "remote", "plan p50"):
        table.add_column(name, justify="right")
    for name, row in document["policies"].items():
        after = row[f"{kind}imbalance_after"]
        beside = row["imbalance_after"]["mean"] if by_time else after["p50"]
        table.add_row(
            name,
            *(f"{value:.3f}" for value in (after["mean"], beside, after["p99"], after["max"])),
            f"{row['replicas']['mean']:.1f}",
            str(row["slots_needed"]),
            f"{row['remote_fraction']:.1%}",
            _time(row["plan_seconds"]["p50"]),
        )
    return Group(head, table)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
