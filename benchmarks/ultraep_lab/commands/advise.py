"""`ultraep-serve advise`: whether to balance, with how many slots, and why."""

import argparse
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator
from rich.console import Group, RenderableType
from rich.text import Text

from ultraep_lab.advise.advice import advise, prefill_trace
from ultraep_lab.advise.recommend import (
    advice_document,
    live_batch_tokens,
    live_document,
    live_figures,
)
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.commands.machine import MachineFlags, machine_setting
from ultraep_lab.comparators import policy_function
from ultraep_lab.plots import draw
from ultraep_lab.tables import figures_table
from ultraep_lab.trace import batches
from ultraep_serve.cli.arguments import JsonFile, prepare_outputs, show, write_pictures
from ultraep_serve.costs.shapes import model_shape
from ultraep_serve.errors import ConfigError, understood
from ultraep_serve.system.settings import Directory, Each, Listed, Names, Url

__all__ = ["add_arguments", "run"]

MIB = 1 << 20


def _known_policies(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if policy_function(name).refreshed_every:
            raise ValueError(f"{name} is a policy of `replay` only")
    return names


class AdviseFlags(MachineFlags):
    """The workload, the machine, and what to compare."""

    trace: Path | None = Field(
        default=None, description="recorded trace: .npz, or .parquet of loads"
    )
    sidecar: Url | None = Field(
        default=None,
        description="address of a running server's sidecar, instead of a trace",
    )
    ep: int | None = Field(
        default=None,
        ge=1,
        description="ranks of the expert-parallel group; with --sidecar as the server says",
    )
    batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens per batch over all ranks; a trace of loads has its own batches",
    )
    slots: Annotated[tuple[Annotated[int, Field(ge=0, le=64)], ...], Listed, Each] = Field(
        default=(0, 1, 2, 4), min_length=1, description="replica slots per rank to compare"
    )
    policies: Annotated[Names, AfterValidator(_known_policies)] = Field(
        default=("quota", "eplb"), description="policies to compare with off"
    )
    limit: int = Field(default=16, ge=1, description="plan at most N batches")
    domain_size: int | None = Field(
        default=None, ge=1, description="ranks per domain (default: GPUs that NVLink joins)"
    )
    json_file: JsonFile = None
    plots: Directory | None = Field(
        default=None,
        description="draw three pictures into DIR",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "AdviseFlags":
        if (self.trace is None) == (self.sidecar is None):
            raise ValueError("give --trace FILE or --sidecar URL, one of them")
        if self.trace is not None and self.ep is None:
            raise ValueError(
                "--ep is missing: give the number of ranks that experts are spread over"
            )
        if self.sidecar is not None and self.plots is not None:
            raise ValueError("a live server has no expert loads to draw; use --plots with --trace")
        return self


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``AdviseFlags``."""
    parser.description = (
        "Plan a recorded workload with each policy and predict prefill times on named hardware, or "
        "read the imbalance of a running server. Says so where balancing is better left off."
    )
    AdviseFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Predict, write the files, print. Raises UltraEPError with what to do."""
    flags = AdviseFlags.from_flags(arguments)
    prepare_outputs(flags.json_file)
    pictures: dict[str, bytes] = {}
    if flags.trace is not None and flags.ep is not None:
        document, pictures = _from_trace(flags, flags.trace, flags.ep)
    else:
        document = _from_sidecar(flags, flags.sidecar or "")
    if flags.plots is not None:
        write_pictures(flags.plots, pictures)
    show(document, _view(document), flags.json_file)
    return 0


def _from_trace(
    flags: AdviseFlags, trace: Path, num_ranks: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    shape = model_shape(flags.model)
    setting = machine_setting(flags, shape, num_ranks, flags.domain_size)
    cut = batches(prefill_trace(trace, shape), flags.batch_tokens, num_ranks)
    advice = advise(setting, cut, flags.slots, flags.policies, flags.limit)
    document = advice_document(advice, trace.name, flags.hardware)
    shown = document["recommendation"].get("slots", _usual(flags.slots))
    return document, dict(draw(advice, shown)) if flags.plots else {}


def _from_sidecar(flags: AdviseFlags, url: str) -> dict[str, Any]:
    with Sidecar(url, token=None) as sidecar, understood(url):
        # Under another policy than quota only batches with balancing off have an imbalance.
        figures = live_figures(sidecar.get("/v1/balance")) or live_figures(
            sidecar.get("/v1/balance?policy=off")
        )
        if figures is None:
            raise ConfigError(
                "the server has measured no batch yet: send it prompts of usual length under "
                "policy quota, or record a trace and use --trace"
            )
        tokens: float | None = flags.batch_tokens
        if tokens is None:
            tokens = live_batch_tokens(sidecar.get("/v1/balance/batches?limit=200"))
        if flags.ep not in (None, figures.num_ranks):
            raise ConfigError(
                f"the server has {figures.num_ranks} ranks; its imbalance says nothing about "
                f"--ep {flags.ep}"
            )
        shape, slots = model_shape(flags.model), max(1, _usual(flags.slots))
        setting = machine_setting(flags, shape, figures.num_ranks, flags.domain_size)
        return live_document(setting, figures, tokens, slots, sidecar.url, flags.hardware)


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
    heads = ("policy", "slots", "imbalance", "gain", "layers\nmoved", "MiB per\nrank")
    table = figures_table((*heads, "break-even\ntokens"), texts=("policy",))
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
