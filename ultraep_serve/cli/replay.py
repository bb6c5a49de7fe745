"""`ultraep-serve replay`: what each policy would have made of a recorded workload."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_serve.cli.arguments import DEFAULT, listed, require_packages
from ultraep_serve.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ultraep_serve.offline.comparators import PolicyFunction
    from ultraep_serve.offline.replay import ReplayOptions

__all__ = ["add_parser", "run"]

MOST_LAYERS = 10_000  # no model has more


def add_parser(subparsers: Any) -> None:
    """Add `replay` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "replay",
        help="balance a recorded workload with each policy",
        description="Plan every layer of every batch of a trace with each policy, and compare. "
        "No server and no GPU is needed.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help=".npz, or .parquet of loads")
    parser.add_argument("--ep", type=int, required=True, help="ranks of the expert-parallel group")
    parser.add_argument("--slots", type=int, default=2, help=f"per rank ({DEFAULT})")
    parser.add_argument(
        "--batch-tokens", type=int, help="tokens per batch; not for traces of loads"
    )
    parser.add_argument(
        "--policy",
        action="append",
        required=True,
        help="off, quota, eplb, eplb-slots, lplb, llep, exact or ideal; may be repeated",
    )
    parser.add_argument("--layers", nargs="+", help="as in 0 3 6-8 (default: all)")
    parser.add_argument("--limit", type=int, help="batches at most")
    parser.add_argument(
        "--phase",
        choices=("prefill", "decode", "all"),
        default="prefill",
        help=f"what to replay where the trace tells them apart ({DEFAULT})",
    )
    parser.add_argument("--domain", type=int, help="ranks that reach each other's memory")
    parser.add_argument(
        "--experts", type=int, help="experts of the model, where the trace does not say"
    )
    _add_history_arguments(parser)
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument(
        "--dump-plans", type=Path, help=".npz file for the plans of one policy that keeps masters"
    )
    parser.set_defaults(run=run)


def _add_history_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history", type=int, default=8, help=f"past batches that eplb and lplb see ({DEFAULT})"
    )
    parser.add_argument(
        "--rebalance-every",
        type=int,
        default=1,
        help=f"batches between their looks at the past ({DEFAULT})",
    )
    parser.add_argument(
        "--skip", type=int, default=0, help=f"first batches that are history only ({DEFAULT})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay, write the files, print a table. Raises UltraEPError with what to do."""
    require_packages("rich")
    from rich.console import Console

    from ultraep_serve.files import prepare_output, write_json
    from ultraep_serve.offline.replay import replay, replay_document, write_plans
    from ultraep_serve.offline.store import load_trace
    from ultraep_serve.offline.trace import DECODE, PREFILL, of_phase

    policies, options = _policies(arguments.policy), _options(arguments)
    for path in (arguments.json, arguments.dump_plans):
        if path is not None:
            prepare_output(path)
    trace = load_trace(arguments.trace, num_experts=arguments.experts)
    if arguments.phase != "all":
        trace = of_phase(trace, PREFILL if arguments.phase == "prefill" else DECODE)
    result = replay(trace, options, policies, keep_plans=arguments.dump_plans is not None)
    document = replay_document(result, options, arguments.trace.name)
    if result.plans is not None:
        write_plans(arguments.dump_plans, result.plans)
    if arguments.json is not None:
        write_json(arguments.json, document)
    Console().print(_view(document))
    return 0


def _policies(names: list[str]) -> "list[PolicyFunction]":
    from ultraep_serve.offline.comparators import policy_function

    wanted = [name for text in names for name in listed(text)]
    if not wanted:
        raise ConfigError("--policy names no policy")
    return [policy_function(name) for name in dict.fromkeys(wanted)]


def _options(arguments: argparse.Namespace) -> "ReplayOptions":
    from ultraep_serve.offline.replay import ReplayOptions

    return ReplayOptions(
        num_ranks=arguments.ep,
        num_slots=arguments.slots,
        batch_tokens=arguments.batch_tokens,
        layers=None if arguments.layers is None else _layers(arguments.layers),
        limit=arguments.limit,
        domain_size=arguments.domain,
        history_batches=arguments.history,
        rebalance_every=arguments.rebalance_every,
        skip=arguments.skip,
    )


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


def _view(document: dict[str, Any]) -> "RenderableType":
    """The document as a table for a terminal of 80 characters."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first = next(iter(document["policies"].values()))["imbalance_before"]
    trace = document["trace"]
    head = Text(f"{trace['file']}: EP{document['ep']}, {document['slots']} slots, ")
    head.append(f"{document['batches']} batches of {trace['layers']} layers\n")
    head.append(f"busiest rank over mean without balancing: {first['mean']:.3f}")
    head.append(f" (worst {first['max']:.3f})")
    if "floor" in document:
        floor = document["floor"]
        head.append(f"\nfloor of domains of {trace['domain']} ranks: {floor['mean']:.3f}")
        head.append(f" (worst {floor['max']:.3f}); no plan inside them can be below")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("mean", "p50", "p99", "worst", "copies", "slots", "remote", "plan p50"):
        table.add_column(name, justify="right")
    for name, row in document["policies"].items():
        after = row["imbalance_after"]
        table.add_row(
            name,
            *(f"{after[key]:.3f}" for key in ("mean", "p50", "p99", "max")),
            f"{row['replicas']['mean']:.1f}",
            str(row["slots_needed"]),
            f"{row['remote_fraction']:.1%}",
            _time(row["plan_seconds"]["p50"]),
        )
    return Group(head, table)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
