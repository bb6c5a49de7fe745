"""What a person sees of a benchmark: its progress, its JSON document, and tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import PrefillOptions, PrefillResult, measure_prefill
from ultraep_lab.bench.prompts import PromptSource
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.progress import Progress
from ultraep_lab.tables import figures_table
from ultraep_lab.this_machine import describe
from ultraep_serve.types import Policy

SCHEMA_VERSION = 2
Document = Mapping[str, Any]


def measure_with_progress(
    server: Server,
    sidecar: Sidecar,
    source: PromptSource,
    options: PrefillOptions,
    progress: Progress,
    seconds_after: float = 0.0,
) -> PrefillResult:
    """``measure_prefill``, and what is known of the time left.

    ``seconds_after``: what follows takes.
    """
    began = progress.seconds

    def on_step(description: str, share: float) -> None:
        took = progress.seconds - began
        left = took * (1 - share) / share + seconds_after if share else None
        progress.say(f"measuring, {description}", left)

    try:
        return measure_prefill(server, sidecar, source, options, on_step)
    finally:
        progress.end()


def prefill_document(
    result: PrefillResult, server: Server, command: str, model: str = ""
) -> dict[str, Any]:
    """The benchmark as JSON: seconds, tokens, and imbalance as max/mean over ranks.

    ``model`` names it better than the server does, if it is not empty.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "ranks": result.num_ranks,
        "url": server.url,
        "model": model or server.model,
        "machine": describe(),
        "command": command,
        "started": result.started,
        "rows": [length.to_json() for length in result.lengths],
        "imbalance": _imbalance_summary(result.balance),
        "overhead": _overhead(result),
        "layers": result.balance.get("layers", []) if result.balance else [],
    }


def _imbalance_summary(balance: Document | None) -> dict[str, dict[str, float]] | None:
    """Mean and worst imbalance before and after; None where no batch was balanced."""
    if balance is None or balance["imbalance"]["before"]["mean"] is None:
        return None
    return {
        when: {name: balance["imbalance"][when][name] for name in ("mean", "max")}
        for when in ("before", "after")
    }


def _overhead(result: PrefillResult) -> dict[str, float] | None:
    """Seconds that balancing itself took in the quota rounds, by the ranks' own clocks.

    Their sum, and its share of these rounds' times to first token, which other work on the machine
    disturbs less than a comparison of times. None where the sidecar does not hold all of them.
    """
    balance = result.balance
    if balance is None or not balance["layers"]:
        return None
    seconds = [took for length in result.lengths for took in length.samples[Policy.QUOTA]]
    if min(layer["records"] for layer in balance["layers"]) < len(seconds):
        return None
    spent = float(balance["savings"]["spent_seconds"])
    return {"spent_seconds": spent, "share_of_ttft": spent / sum(seconds)}


def prefill_view(document: Document) -> RenderableType:
    """The document for a terminal: a table of times, then what balancing did."""
    measured = document["rows"][0]["ttft_seconds"]
    variants = [policy.value for policy in Policy if policy.value in measured]
    figures = [figure for figure in _FIGURES if _any_row(document, figure)]
    table = figures_table(
        ["prompt\ntokens", *variants, *map(_FIGURES.__getitem__, figures)],
        title="Time to first token: median, and the middle half of the samples",
        padding=0,  # eight columns have to fit a terminal of 80 characters
    )
    for row in document["rows"]:
        times = [_times(row, variant) for variant in variants]
        table.add_row(str(row["prompt_tokens"]), *times, *(_figure(row, name) for name in figures))
    return Group(
        table,
        _imbalance_line(document.get("imbalance")),
        _overhead_line(document.get("overhead")),
    )


def _imbalance_line(imbalance: Document | None) -> Text:
    """How evenly the ranks were loaded, as one sentence."""
    if imbalance is None:
        return Text("No balanced batch was recorded while measuring.", style="yellow")
    before, after = imbalance["before"], imbalance["after"]
    line = Text("Busiest rank over mean: ")
    line.append(f"{before['mean']:.2f} -> {after['mean']:.2f}", style="bold green")
    line.append(f" (worst {before['max']:.2f} -> {after['max']:.2f}; 1.00 is perfect)")
    return line


def _overhead_line(overhead: Document | None) -> Text:
    """What balancing took, as one sentence; empty where that is not known."""
    if overhead is None:
        return Text("")
    return Text(f"Counting, planning and moving took {overhead['share_of_ttft']:.2%} of the time.")


_FIGURES = {
    "speedup": "speedup",
    "efficiency": "of\nideal",
    "recovered": "recovered",
    "quota_over_off": "quota/off\nper round",
}


def _any_row(document: Document, figure: str) -> bool:
    return any(_figure(row, figure) for row in document["rows"])


def _figure(row: Document, name: str) -> str:
    """One cell; empty where it cannot be computed."""
    if name == "quota_over_off":
        paired = row["paired"][name]
        return _with_range(paired["median"], paired, "") if paired else ""
    value = row[name]
    if value is None:
        return ""
    return f"{value:.2f}x" if name == "speedup" else f"{value:.0%}"


def _times(row: Document, variant: str) -> str:
    median, spread = row["ttft_seconds"][variant], row["ttft_spread"][variant]
    return _with_range(median, spread, " s")


def _with_range(median: float, spread: Document, unit: str) -> str:
    digits = 3 if median < 1 else 2 if median < 10 else 1
    low, high = spread["p25"], spread["p75"]
    return f"{median:.{digits}f}{unit}\n[dim]{low:.{digits}f}-{high:.{digits}f}[/dim]"
