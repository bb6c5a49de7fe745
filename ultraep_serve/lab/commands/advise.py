"""`ultraep-serve advise`: whether to balance, with how many slots, and why."""

import argparse
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ultraep_serve.cli.arguments import (
    add_json_argument,
    names,
    number,
    numbers,
    prepare_outputs,
    show,
    write_pictures,
)
from ultraep_serve.costs.shapes import model_shape
from ultraep_serve.errors import ConfigError, understood
from ultraep_serve.lab.advise.advice import advise, prefill_batches
from ultraep_serve.lab.advise.recommend import (
    advice_document,
    live_batch_tokens,
    live_document,
    live_figures,
)
from ultraep_serve.lab.bench.sidecar import Sidecar
from ultraep_serve.lab.commands.machine import (
    add_machine_arguments,
    check_machine_arguments,
    machine_setting,
)
from ultraep_serve.lab.comparators import policy_function
from ultraep_serve.lab.plots import draw

__all__ = ["add_arguments", "run"]

MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload, the machine, and what to compare."""
    parser.description = (
        "Plan a recorded workload with each policy and predict prefill times on named hardware, or "
        "read the imbalance of a running server. Says so where balancing is better left off."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    traces = "recorded trace: .npz, or .parquet of loads"
    source.add_argument("--trace", type=Path, metavar="FILE", help=traces)
    source.add_argument("--sidecar", metavar="URL", help="address of a running server's sidecar")
    ranks = "ranks of the expert-parallel group; with --sidecar as the server says"
    parser.add_argument("--ep", type=number(1), metavar="N", help=ranks)
    tokens = "tokens per batch over all ranks; a trace of loads has its own batches"
    parser.add_argument("--batch-tokens", type=number(1), metavar="N", help=tokens)
    parser.add_argument(
        "--slots", type=numbers(0, 64), metavar="N,...", default="0,1,2,4",
        help="replica slots per rank to compare",
    )  # fmt: skip
    parser.add_argument(
        "--policies", type=names, metavar="NAME,...", default="quota,eplb",
        help="policies to compare with off",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=number(1), metavar="N", default=16, help="plan at most N batches"
    )
    add_machine_arguments(parser)
    domain = "ranks per domain (default: GPUs that NVLink joins)"
    parser.add_argument("--domain-size", type=number(1), metavar="N", help=domain)
    add_json_argument(parser)
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw three pictures into DIR")


def run(arguments: argparse.Namespace) -> int:
    """Predict, write the files, print. Raises UltraEPError with what to do."""
    check_machine_arguments(arguments)
    prepare_outputs(arguments.json)
    source = _from_trace if arguments.trace is not None else _from_sidecar
    document, pictures = source(arguments)
    write_pictures(arguments.plots, pictures)
    show(document, _view(document), arguments.json)
    return 0


def _from_trace(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, bytes]]:
    if arguments.ep is None:
        raise ConfigError("--ep is missing: give the number of ranks that experts are spread over")
    for name in arguments.policies:
        policy_function(name)  # before the work, not after it
    shape = model_shape(arguments.model_config)
    setting = machine_setting(arguments, shape, arguments.ep, arguments.domain_size)
    cut = prefill_batches(arguments.trace, setting.shape, arguments.batch_tokens, arguments.ep)
    advice = advise(setting, cut, arguments.slots, arguments.policies, arguments.limit)
    document = advice_document(advice, arguments.trace.name, arguments.hardware)
    shown = document["recommendation"].get("slots", _usual(arguments.slots))
    return document, dict(draw(advice, shown)) if arguments.plots else {}


def _from_sidecar(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, bytes]]:
    if arguments.plots is not None:
        raise ConfigError("a live server has no expert loads to draw; use --plots with --trace")
    with Sidecar(arguments.sidecar, token=None) as sidecar, understood(arguments.sidecar):
        # Under another policy than quota only batches with balancing off have an imbalance.
        figures = live_figures(sidecar.get("/v1/balance")) or live_figures(
            sidecar.get("/v1/balance?policy=off")
        )
        if figures is None:
            raise ConfigError(
                "the server has measured no batch yet: send it prompts of usual length under "
                "policy quota, or record a trace and use --trace"
            )
        tokens = arguments.batch_tokens
        if tokens is None:
            tokens = live_batch_tokens(sidecar.get("/v1/balance/batches?limit=200"))
        if arguments.ep not in (None, figures.num_ranks):
            raise ConfigError(
                f"the server has {figures.num_ranks} ranks; its imbalance says nothing about "
                f"--ep {arguments.ep}"
            )
        shape, slots = model_shape(arguments.model_config), max(1, _usual(arguments.slots))
        setting = machine_setting(arguments, shape, figures.num_ranks, arguments.domain_size)
        document = live_document(setting, figures, tokens, slots, sidecar.url, arguments.hardware)
    return document, {}


def _usual(slots: tuple[int, ...]) -> int:
    """The number of slots to show where none is recommended."""
    return 2 if 2 in slots else max(slots)


def _view(document: dict[str, Any]) -> RenderableType:
    """The advice for a terminal of 80 characters: verdict first."""
    now, verdict = document["imbalance_now"], document["recommendation"]
    head = Text(f"{document['model']} ({document['weights']}), EP{document['ep']} on ")
    head.append(f"{document['hardware']}, batches of {document['batch_tokens']:.0f} tokens\n")
    head.append(f"imbalance now: {now['mean']:.3f} (busiest rank over mean)")
    if now.get("floor", 1.0) > 1.001:
        head.append(f"; lowest possible inside domains: {now['floor']:.3f}")
    head.append("\n\n")
    if verdict["balance"]:
        head.append(f"Turn it on: --policy quota --slots {verdict['slots']}", style="bold green")
        if verdict["min_batch_tokens"]:
            head.append(f" --min-batch-tokens {verdict['min_batch_tokens']}", style="bold green")
    elif verdict["balance"] is False:
        head.append("Leave it off.", style="bold yellow")
    for reason in verdict["reasons"]:
        head.append(f"\n- {reason}")
    notes = Text("Assumed:")
    for line in document["assumptions"]:
        notes.append(f"\n- {line}")
    table = [_table(document["outcomes"])] if document.get("outcomes") else [Text("")]
    return Group(head, *table, notes)


def _table(outcomes: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for name in (
        "slots",
        "imbalance",
        "gain",
        "layers\nmoved",
        "MiB per\nrank",
        "break-even\ntokens",
    ):
        table.add_column(name, justify="right")
    for row in outcomes:
        slots = row["slots_needed"] if row["policy"] in ("llep", "exact") else row["slots"]
        table.add_row(
            row["policy"],
            str(slots),
            f"{row['imbalance']:.3f}",
            f"{row['predicted_gain']:.2f}x",
            f"{row['moved_share']:.0%}",
            f"{row['memory_bytes'] / MIB:.0f}",
            str(row["break_even_tokens"] or "-"),
        )
    return table
