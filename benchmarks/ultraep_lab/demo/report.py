"""The figures of `ultraep-serve demo` on one screen: a benchmark and a comparison of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ultraep_lab.bench.greedy_tokens import ROUNDING

BAR_CELLS = 14  # length of the longest bar; all fits a terminal of 80 characters
BARS = {  # by the names of the benchmark: label and colour
    "off": ("off", "red"),
    "quota": ("on", "green"),
    "ideal": ("ideal", "blue"),
}
ABOUT_IDEAL = "ideal: every rank is given the same load by force; its answers are wrong"


def demo_report(
    bench: Mapping[str, Any],
    token_check: Mapping[str, Any],
    dtype: str = "bfloat16",
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The demo's JSON, from the benchmark's document and ``TokenComparison.to_json``.

    ``dtype`` is what the server that was measured computed in; ``notes`` say what was chosen for
    this machine. Figures that the benchmark lacks are None.
    """
    imbalance = bench["imbalance"] or {"before": {}, "after": {}}
    return {
        "ranks": bench["ranks"],
        "dtype": dtype,
        "notes": list(notes),
        "rows": [
            {
                "prompt_tokens": row["prompt_tokens"],
                "ttft_seconds": {name: row["ttft_seconds"].get(name) for name in BARS},
                "efficiency": row["efficiency"],
                "recovered": row["recovered"],
            }
            for row in bench["rows"]
        ],
        "imbalance": {
            when: {name: imbalance[when].get(name) for name in ("mean", "max")}
            for when in ("before", "after")
        },
        "token_check": dict(token_check),
        "machine": bench["machine"],
        "command": bench["command"],
    }


def demo_view(report: Mapping[str, Any]) -> RenderableType:
    """The report as bars: how evenly ranks were loaded, how long prefill took, and the tokens.

    Bars of one prompt length share a scale, so that lengths of a different order stay readable.
    """
    parts: list[RenderableType] = [
        Text("Load of the busiest rank over the mean (1.00 is perfect)", style="bold"),
        _imbalance_bars(report["imbalance"]),
        Text(),
        Text("Time to first token (median) with balancing, by tokens of the prompt", style="bold"),
        _time_bars(report["rows"]),
        Text(ABOUT_IDEAL, style="dim"),
        *(Text(note, style="dim") for note in report["notes"]),
        Text(),
        _token_lines(report["token_check"]),
    ]
    title = f"Prefill on {report['ranks']} expert-parallel ranks ({report['dtype']})"
    return Panel(Group(*parts), title=title, expand=False, padding=(1, 2))


def _imbalance_bars(imbalance: Mapping[str, Any]) -> RenderableType:
    before, after = imbalance["before"], imbalance["after"]
    if before["mean"] is None or after["mean"] is None:
        return Text("no batch was balanced", style="yellow")
    table = Table.grid(padding=(0, 2))
    for label, figures, name in (("before", before, "off"), ("after", after, "quota")):
        bar = _bar(figures["mean"], before["mean"], name)
        table.add_row(label, bar, f"{figures['mean']:.2f}", f"worst {figures['max']:.2f}")
    return table


def _time_bars(rows: list[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        times = row["ttft_seconds"]
        longest = max((seconds for seconds in times.values() if seconds is not None), default=0.0)
        tokens = str(row["prompt_tokens"])
        for name, (label, _) in BARS.items():
            if (seconds := times.get(name)) is not None:
                bar = _bar(seconds, longest, name)
                table.add_row(tokens, label, bar, f"{seconds:.2f} s", _note(row, name))
                tokens = ""
    return table


def _note(row: Mapping[str, Any], name: str) -> str:
    """Beside the bar of quota its gain; beside others how it compares with them."""
    off, quota = row["ttft_seconds"]["off"], row["ttft_seconds"]["quota"]
    notes = []
    if name == "quota":
        if off is not None:
            notes.append(f"{off / quota:.2f}x as fast")
        if row["efficiency"] is not None:
            notes.append(f"{row['efficiency']:.0%} of ideal")
    elif name == "ideal" and row["recovered"] is not None:
        notes.append(f"{row['recovered']:.0%} of the gap closed")
    return ", ".join(notes)


def _bar(value: float, longest: float, name: str) -> Text:
    cells = round(BAR_CELLS * min(1.0, value / longest)) if longest else 0
    return Text("█" * max(1, cells), style=BARS[name][1])


def _token_lines(check: Mapping[str, Any]) -> Text:
    """In float32, so that log-probabilities differ by rounding alone where answers are right."""
    ties, total, apart = check["ties"], check["prompts"], check["max_logprob_difference"]
    same = check["identical"] + ties
    words = f"{same} of {total} prompts give the same tokens with balancing on ({check['dtype']})"
    said = f"log-probabilities differ by {apart:.1e} at most"
    if ties:
        said = f"{ties} of them a tie; {said}"
    good = same == total and apart <= ROUNDING
    text = f"{'✔' if good else '✘'} {words}\n  {said}"
    return Text(text, style="bold green" if good else "bold red")
