"""`ultraep-serve status`: how balanced a running server is, in the terminal."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ultraep_serve.cli import printable
from ultraep_serve.sidecar.status import ServerStatus, status_reader
from ultraep_serve.system.settings import Settings

_REFRESH_SECONDS = 1.0
_BAR_CELLS = 24
_MIB = 1 << 20
_OF_RANKS = "assignments over the mean, summed over layers: their imbalances may cancel out"


class StatusFlags(Settings):
    """Which server, and how to show it."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="the server that ultraep-serve started on this port",
    )
    run_dir: Path | None = Field(
        default=None,
        description="the server with this run directory",
        json_schema_extra={"metavar": "DIR"},
    )
    url: str | None = Field(
        default=None,
        description="the server whose sidecar is at this address",
        json_schema_extra={"metavar": "URL"},
    )
    as_json: bool = Field(
        default=False,
        validation_alias="json",
        description="print what the sidecar answers to /v1/balance",
    )
    watch: bool = Field(default=False, description="show it again every second, until Ctrl-C")

    @model_validator(mode="after")
    def _one_server(self) -> "StatusFlags":
        if sum(given is not None for given in (self.port, self.run_dir, self.url)) > 1:
            raise ValueError("--port, --run-dir and --url exclude each other: give one of them")
        return self


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``StatusFlags``."""
    parser.description = (
        "Show how balanced a running server is, without asking a sidecar: by default the only "
        "balanced server of this user on this machine. Exits with 0 when the server is ready, 1 "
        "when it is not, 2 when there is none."
    )
    StatusFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 0 when the server is ready, else 1. Raises NoServerError."""
    flags = StatusFlags.from_flags(arguments)
    read = status_reader(flags.port, flags.run_dir, flags.url)
    found = read()
    with _output(flags) as show, contextlib.suppress(KeyboardInterrupt):
        show(found)
        while flags.watch:
            time.sleep(_REFRESH_SECONDS)
            found = read()
            show(found)
    return 0 if found.document["ready"] else 1


@contextlib.contextmanager
def _output(flags: StatusFlags) -> Iterator[Callable[[ServerStatus], None]]:
    if flags.as_json:
        yield lambda found: print(json.dumps(found.document, separators=(",", ":")), flush=True)
    elif flags.watch:
        with Live(auto_refresh=False) as live:
            yield lambda found: live.update(status_view(found), refresh=True)
    else:
        yield lambda found: Console().print(status_view(found))


def status_view(found: ServerStatus) -> RenderableType:
    """One server for a terminal: state, what was decided, imbalance, time, and a bar per rank."""
    document = printable(found.document)
    if "engine" not in document:  # unbalanced, or no rank has joined yet
        return Group(_state(document), Text(found.where, style="dim"))
    about = (
        f"{document['engine']}, {document['mode']} parallel, {document['num_ranks']} ranks, "
        f"policy {document['policy'] or 'not known yet'}"
    )
    figures = Table.grid(padding=(0, 2))
    figures.add_row("batches", _batches(document["batches"]))
    figures.add_row("imbalance", _imbalance(document))
    if _speeds_differ(document):
        figures.add_row("by time", _time_imbalance(document))
    figures.add_row("time", _savings(document["savings"]))
    figures.add_row("moved", f"{document['bytes_moved'] / _MIB:,.1f} MiB of expert weights")
    figures.add_row("copies", _copies(document["replicas"]))
    figures.add_row("proof", _proof(document))
    title = Text(about, style="bold")
    where = Text(found.where, style="dim")
    of_ranks = Group(Text(_OF_RANKS, style="dim"), _ranks(document))
    return Group(_state(document), title, where, Text(), figures, Text(), of_ranks)


def _state(document: Mapping[str, Any]) -> Text:
    if document["ready"] and document["reasons"]:
        style = "bold red" if "engine" in document else "yellow"
        return Text(f"! {'; '.join(document['reasons'].values())}", style=style)
    if document["ready"]:
        return Text("✔ ready", style="green")
    reasons = (
        reason if rank == "run" else f"rank {rank}: {reason}"
        for rank, reason in document["reasons"].items()
    )
    return Text(f"✘ not ready: {'; '.join(reasons)}", style="bold red")


def _proof(document: Mapping[str, Any]) -> Text:
    checked, verified = document["self_check"], document["verification"]
    line = {
        "passed": f"self-check passed in {checked['seconds']:.1f} s",
        "off": "no self-check",
        "failed": "self-check failed",
        None: "self-check has not ended",
    }[checked["result"]]
    text = Text(line, style="red" if checked["result"] == "failed" else "none")
    counts = f"; verified {verified['layers']:,} layers, {verified['failures']:,} failed"
    text.append(counts, style="bold red" if verified["failures"] else "none")
    for check in checked["checks"]:
        if check["warning"]:
            text.append(f"\n{check['name']}: {check['warning']}", style="yellow")
    return text


def _batches(batches: Mapping[str, Any]) -> str:
    skipped = batches["skipped"].items()
    counts = [f"{count} {reason.replace('_', ' ')}" for reason, count in skipped if count]
    return ", ".join([f"{batches['planned']} planned", *counts])


def _imbalance(document: Mapping[str, Any]) -> Text:
    before, after = document["imbalance"]["before"], document["imbalance"]["after"]
    if before["mean"] is None:
        return Text("no prefill batch yet", style="yellow")
    line = Text(f"{before['mean']:.2f} -> {after['mean']:.2f}", style="bold green")
    worst = f" (worst {before['max']:.2f} -> {after['max']:.2f}; "
    line.append(f"{worst}floor {document['floor']:.2f}; 1.00 is perfect)", style="none")
    return line


def _copies(replicas: Mapping[str, Any]) -> str:
    if replicas["mean"] is None:
        return ""
    return f"{replicas['mean']:.1f} of experts in a layer, {replicas['new']:.1f} new"


def _speeds_differ(document: Mapping[str, Any]) -> bool:
    return any(rank["assignments"]["speed"] < 1 for rank in document["ranks"])


def _time_imbalance(document: Mapping[str, Any]) -> str:
    before, after = (document["time_imbalance"][when] for when in ("before", "after"))
    if before["mean"] is None:
        return ""
    return f"{before['mean']:.2f} -> {after['mean']:.2f} (assignments over speeds)"


def _savings(savings: Mapping[str, float]) -> str:
    saved, spent = savings["saved_seconds"], savings["spent_seconds"]
    return f"{saved:.2f} s saved, {spent:.2f} s spent, net {savings['net_seconds']:+.2f} s"


def _ranks(document: Mapping[str, Any]) -> Table:
    """Assignments of each rank over the mean, before and after; all share one scale.

    The mean is of all ranks that share its layers. Speeds are shown where they differ.
    """
    table = Table.grid(padding=(0, 2))
    differ = _speeds_differ(document)
    table.add_row("rank", "before", "", "after", "", "speed" if differ else "", style="dim")
    ranks = [(rank, rank["assignments"]) for rank in document["ranks"]]
    most = max((max(loads["before"], loads["after"]) for _, loads in ranks), default=0)
    for rank, loads in ranks:
        mean = loads["mean"]
        cells: list[RenderableType] = []
        for when, style in (("before", "yellow"), ("after", "green")):
            bar = round(_BAR_CELLS * loads[when] / most) if most else 0
            cells.append(Text("█" * bar, style=style))
            cells.append(f"{loads[when] / mean:.2f}" if mean else "")
        cells.append(f"{loads['speed']:.2f}" if differ else "")
        state = "" if rank["alive"] and rank["state"] == "ready" else rank["state"]
        table.add_row(f"{rank['rank']:>4}", *cells, Text(state, style="red"))
    return table
