"""What a person sees of a benchmark: its progress, its JSON document, and tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.progress import MofNCompleteColumn
from rich.text import Text

from ultraep_lab.bench.prefill import (
    WITHOUT_EP,
    PrefillOptions,
    PrefillResult,
    Servers,
    measure_prefill,
)
from ultraep_lab.bench.prompts import PromptSource
from ultraep_lab.tables import figures_table, quiet_progress
from ultraep_serve.system.machine import describe
from ultraep_serve.types import Policy

__all__ = ["measure_with_progress", "prefill_document", "prefill_view"]

SCHEMA_VERSION = 1
Document = Mapping[str, Any]


def measure_with_progress(
    servers: Servers, source: PromptSource, options: PrefillOptions
) -> PrefillResult:
    """``measure_prefill`` behind a progress bar."""
    with quiet_progress(MofNCompleteColumn()) as progress:
        total = options.rounds * len(servers.variants(options.policies))
        task = progress.add_task("", total=total, completed=-1)

        def on_step(description: str) -> None:
            progress.update(task, advance=1, description=description, refresh=True)

        return measure_prefill(servers, source, options, on_step)


def prefill_document(
    result: PrefillResult, servers: Servers, command: str, model: str = ""
) -> dict[str, Any]:
    """The benchmark as JSON: seconds, tokens, and imbalance as max/mean over ranks.

    ``model`` names it better than the server does, if it is not empty.
    """
    plain = servers.without_ep
    return {
        "schema_version": SCHEMA_VERSION,
        "ranks": result.num_ranks,
        "url": servers.balanced.url,
        "model": model or servers.balanced.model,
        WITHOUT_EP: {"url": plain.url, "model": model or plain.model} if plain else None,
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
    seconds = [took for length in result.lengths for took in length.seconds_of(Policy.QUOTA)]
    if min(layer["records"] for layer in balance["layers"]) < len(seconds):
        return None
    spent = float(balance["savings"]["spent_seconds"])
    return {"spent_seconds": spent, "share_of_ttft": spent / sum(seconds)}


def prefill_view(document: Document) -> RenderableType:
    """The document for a terminal: a table of times, then what balancing did."""
    names = [*(policy.value for policy in Policy), WITHOUT_EP]
    variants = [name for name in names if name in document["rows"][0]["ttft_seconds"]]
    figures = [figure for figure in _FIGURES if _any_row(document, figure)]
    heads = [_HEADS.get(variant, variant) for variant in variants]
    table = figures_table(
        ["prompt\ntokens", *heads, *map(_FIGURES.__getitem__, figures)],
        title="Time to first token: median, and the middle half of the samples",
        padding=0,  # nine columns have to fit a terminal of 80 characters
    )
    for row in document["rows"]:
        times = [_times(row, variant) for variant in variants]
        table.add_row(str(row["prompt_tokens"]), *times, *(_figure(row, name) for name in figures))
    return Group(
        table,
        *filter(None, map(_without_ep_line, document["rows"])),
        _imbalance_line(document.get("imbalance")),
        _overhead_line(document.get("overhead")),
    )


def _without_ep_line(row: Document) -> Text | None:
    """Which is faster, quota or the engine without expert parallelism, as one sentence."""
    if (paired := row["paired"].get("quota_over_without_ep")) is None:
        return None
    percent = round(100 * (paired["median"] - 1))
    how = f"{abs(percent)}% {'longer' if percent > 0 else 'less'} than" if percent else "as long as"
    line = f"{row['prompt_tokens']} tokens: quota takes {how} without EP, "
    line += f"ratio {paired['median']:.3f}"
    if interval := paired["interval"]:
        line += f" ({interval[0]:.3f}-{interval[1]:.3f})"
    return Text(line, style="red" if percent > 0 else "green")


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


_HEADS = {WITHOUT_EP: "without\nEP"}
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
