"""What a person sees of request-rate curves: their JSON document, a table, and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.progress import TimeRemainingColumn
from rich.text import Text

from ultraep_lab.bench.load import LoadOptions, LoadRun
from ultraep_lab.pictures import picture
from ultraep_lab.tables import figures_table, quiet_progress
from ultraep_serve.system.machine import describe

__all__ = [
    "load_document",
    "load_picture",
    "load_progress",
    "load_view",
    "rate_text",
    "ratio_text",
]

SCHEMA_VERSION = 2
Document = Mapping[str, Any]
TIMES = ("ttft_mean_seconds", "ttft_p50_seconds", "ttft_p90_seconds", "ttft_p99_seconds")
COMPARED = (*TIMES, "itl_p99_seconds", "goodput_per_second")
LIMITED = ("ttft_mean_seconds", "ttft_p99_seconds")  # for which the greatest rate is sought
LIMITS = (0.5, 1.0, 1.5, 2.0)  # of the objective
LATE_SECONDS = 0.1  # of the load generator, at its P99
BASES = ("off", "without-ep", "sglang-eplb")  # what quota is compared with


@contextmanager
def load_progress(run: LoadRun, contenders: int) -> Iterator[None]:
    """A progress bar of all windows, by the seconds that their requests take to arrive."""
    windows = contenders * run.options.repeats * len(run.options.rates)
    seconds = contenders * run.options.repeats * run.options.sweep_seconds
    with quiet_progress(TimeRemainingColumn()) as progress:
        task = progress.add_task("warm-up", total=seconds)
        begun: list[float] = []

        def on_step(description: str, takes: float) -> None:
            done = begun[-1] if begun else 0.0
            begun.append(takes)
            text = f"window {len(begun)} of {windows}: {description}"
            progress.update(task, advance=done, description=text, refresh=True)

        run.on_step = on_step
        progress.refresh()
        yield


def load_document(run: LoadRun, contenders: Sequence[str], about: Document) -> dict[str, Any]:
    """The curves as JSON: every window, and what repeats say together.

    ``contenders``: as they will be listed. ``about``: what was measured, and how. ``complete`` is
    whether all windows are there.
    """
    options = run.options
    windows = [
        {"contender": w.contender, "rate": w.rate, "repeat": w.repeat + 1, **w.figures.to_json()}
        for w in run.windows
    ]
    all_windows = len(contenders) * len(options.rates) * options.repeats
    return {
        "schema_version": SCHEMA_VERSION,
        "complete": len(windows) == all_windows,
        **about,
        "load_generator": f"aiperf {run.aiperf.version}",
        "machine": describe(),
        "traffic": _traffic_json(run),
        "ttft_objective_seconds": options.ttft_objective,
        "rows": [
            _row(options, windows, rate, name) for rate in options.rates for name in contenders
        ],
        "contenders": list(contenders),
        "greatest_rates": _greatest_rates(options, windows, contenders),
        "windows": windows,
    }


def _traffic_json(run: LoadRun) -> dict[str, Any]:
    options = run.options
    return {
        "arrivals": "open loop",
        "burstiness": options.burstiness,  # 1 is Poisson
        "texts_in_turn": len(run.sources),
        "requests_per_window": options.requests,
        "prompt_tokens": {"median": options.prompt_median, "p90": options.prompt_p90},
        "output_tokens": options.output_tokens,
        "repeats": options.repeats,
        "seed": options.seed,
    }


def _row(
    options: LoadOptions, windows: Sequence[Document], rate: float, contender: str
) -> dict[str, Any]:
    """One contender at one rate, over repeats; without figures where no repeat was measured."""
    found = _by_repeat(windows, rate, contender)
    names = [
        name for name in next(iter(found.values()), {}) if name.endswith(("_seconds", "_second"))
    ]
    ratios = {}
    for base in BASES if contender == "quota" else ():
        others = _by_repeat(windows, rate, base)
        common = sorted(found.keys() & others.keys())
        if common:
            ratios[base] = {
                name: _ratios([(found[i][name], others[i][name]) for i in common])
                for name in COMPARED
            }
    return {
        "rate": rate,
        "contender": contender,
        "repeats": len(found),
        **{name: _mean([window[name] for window in found.values()]) for name in names},
        "over": ratios,
    }


def _by_repeat(windows: Sequence[Document], rate: float, contender: str) -> dict[int, Document]:
    return {
        window["repeat"]: window
        for window in windows
        if window["rate"] == rate and window["contender"] == contender
    }


def _mean(samples: Sequence[float]) -> dict[str, Any]:
    """Mean over repeats and where it lies with 95 % confidence; None for one repeat."""
    return {"mean": float(np.mean(samples)), "interval": _interval(samples)}


def _ratios(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Geometric mean of ratios within repeats, and where that lies with 95 % confidence.

    None where a goodput was 0.
    """
    if not np.all(pairs):
        return None
    logs = np.log([one / other for one, other in pairs])
    interval = _interval(logs.tolist())
    return {
        "mean": float(np.exp(logs.mean())),
        "interval": [float(np.exp(limit)) for limit in interval] if interval else None,
    }


def _interval(samples: Sequence[float]) -> list[float] | None:
    """Student's t: repeats are few, and each is a mean or an order statistic of many requests."""
    if len(samples) < 2:
        return None
    from scipy.stats import t  # takes a second to import

    half = float(t.ppf(0.975, len(samples) - 1) * np.std(samples, ddof=1) / len(samples) ** 0.5)
    middle = float(np.mean(samples))
    return [middle - half, middle + half]


def _greatest_rates(
    options: LoadOptions, windows: Sequence[Document], contenders: Sequence[str]
) -> list[dict[str, Any]]:
    """By figure and limit: the greatest rate at which each contender stays within it.

    ``quota_over``: how many times another's rate quota's is, by repeat; None where a repeat's
    limit is not passed within the rates measured.
    """
    repeats = sorted({window["repeat"] for window in windows})
    of_repeat = [[w for w in windows if w["repeat"] == repeat] for repeat in repeats]
    bases = [base for base in BASES if {base, "quota"} <= set(contenders)]
    found = []
    for name, part in product(LIMITED, LIMITS):
        limit = part * options.ttft_objective
        rate = partial(_crossing_of, options, name, limit)
        quota_over = {}
        for base in bases:
            crossings = [(rate(some, "quota"), rate(some, base)) for some in of_repeat]
            pairs = [tuple(one["rate"] for one in both if one) for both in crossings]
            known = all(len(both) == 2 and None not in both for both in pairs)
            quota_over[base] = _ratios(pairs) if pairs and known else None
        rates = {contender: rate(windows, contender) for contender in contenders}
        found.append(
            {"figure": name, "limit_seconds": limit, "rates": rates, "quota_over": quota_over}
        )
    return found


def _crossing_of(
    options: LoadOptions, name: str, limit: float, windows: Sequence[Document], contender: str
) -> dict[str, Any] | None:
    """Where the mean over ``windows`` of one figure of one contender passes ``limit``."""
    curve = []
    for rate in options.rates:
        if samples := [window[name] for window in _by_repeat(windows, rate, contender).values()]:
            curve.append((rate, float(np.mean(samples))))
    return _crossing(curve, limit)


def _crossing(curve: Sequence[tuple[float, float]], objective: float) -> dict[str, Any] | None:
    """Where ``curve`` first passes ``objective``, on a straight line between two rates.

    None for an empty curve. Where it lies outside the rates measured, ``rate`` is None and ``is``
    says on which side.
    """
    if not curve:
        return None
    if curve[0][1] > objective:
        return {"rate": None, "is": "below", "limit": curve[0][0]}
    for (rate, before), (next_rate, after) in pairwise(curve):
        if after > objective:
            part = (objective - before) / (after - before)
            return {"rate": rate + part * (next_rate - rate), "is": "between", "limit": next_rate}
    return {"rate": None, "is": "above", "limit": curve[-1][0]}


def load_view(document: Document) -> RenderableType:
    """The document for a terminal: a row per rate and contender, then the greatest rates."""
    heads = ("rate\n1/s", "", *_COLUMNS.values())
    table = figures_table(heads, texts=("",), title="Times in seconds, means over repeats")
    last = None
    for row in document["rows"]:
        if not row["repeats"]:
            continue
        shown = "" if row["rate"] == last else f"{row['rate']:g}"
        last = row["rate"]
        cells = (_shown(row[name]["mean"]) for name in _COLUMNS)
        table.add_row(shown, row["contender"], *cells)
    lines = [_greatest_line(found) for found in document["greatest_rates"]]
    lines += [_ratio_line(row) for row in document["rows"] if row["over"]]
    late = sum(window["lag_p99_seconds"] > LATE_SECONDS for window in document["windows"])
    if late:
        lines.append(
            Text(
                f"In {late} of {len(document['windows'])} windows some requests were sent more "
                f"than {LATE_SECONDS:g} s late: something else took this machine's time.",
                style="yellow",
            )
        )
    if not document["complete"]:
        lines.append(Text("Not complete: the run ended before its last window.", style="red"))
    return Group(table, *lines)


_COLUMNS = {
    "ttft_mean_seconds": "TTFT\nmean",
    "ttft_p50_seconds": "TTFT\nP50",
    "ttft_p90_seconds": "TTFT\nP90",
    "ttft_p99_seconds": "TTFT\nP99",
    "itl_p99_seconds": "ITL\nP99",
    "requests_per_second": "reached\n1/s",
    "goodput_per_second": "goodput\n1/s",
}
_LABELS = {"ttft_mean_seconds": "mean TTFT", "ttft_p99_seconds": "P99 TTFT"}


def _greatest_line(found: Document) -> Text:
    parts = [
        f"{contender} {rate_text(crossing)}"
        for contender, crossing in found["rates"].items()
        if crossing is not None
    ]
    parts += [
        f"quota / {base} {ratio_text(ratio)}"
        for base, ratio in found["quota_over"].items()
        if ratio is not None
    ]
    listed = ", ".join(parts) or "nothing was measured"
    return Text(f"{_LABELS[found['figure']]} within {found['limit_seconds']:g} s up to: {listed}")


def rate_text(crossing: Document) -> str:
    """A greatest rate, or on which side of the rates measured it lies."""
    if crossing["rate"] is not None:
        return f"{crossing['rate']:.2f}/s"
    return f"{'never, from' if crossing['is'] == 'below' else 'at least'} {crossing['limit']:g}/s"


def _ratio_line(row: Document) -> Text:
    parts = []
    for base, ratios in row["over"].items():
        parts.append(f"quota / {base} {ratio_text(ratios['ttft_mean_seconds'])}")
    return Text(f"{row['rate']:g}/s, mean TTFT: {', '.join(parts)}")


def ratio_text(ratio: Document) -> str:
    """A ratio with its interval."""
    interval = ratio["interval"]
    within = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{ratio['mean']:.2f}{within}"


def _shown(value: float) -> str:
    return f"{value:.{3 if value < 1 else 2 if value < 100 else 0}f}"


_STYLES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart
    "without-ep": ("#e69f00", "s"),
    "off": ("#555555", "o"),
    "quota": ("#0072b2", "D"),
    "ideal": ("#009e73", "v"),
    "sglang-eplb": ("#d55e00", "^"),
    "eplb-slots": ("#cc79a7", "P"),
}
_PANELS = {
    "ttft_mean_seconds": "mean time to first token, s",
    "ttft_p50_seconds": "P50 of time to first token, s",
    "ttft_p99_seconds": "P99 of time to first token, s",
    "itl_p99_seconds": "P99 of inter-token latency, s",
    "goodput_per_second": "goodput, requests/s",
}


def load_picture(document: Document) -> bytes:
    """An SVG: a panel per figure, the mean of repeats as a line, every repeat as a point.

    Raises UnsupportedError where matplotlib is not installed.
    """
    panels = [partial(_panel, document=document, name=name) for name in _PANELS]
    return picture(*panels, file_type="svg", size=(11.0, 6.5), columns=3)


def _panel(axes: Any, document: Document, name: str) -> None:
    axes.set_title(_PANELS[name], fontsize="medium")
    axes.set_xlabel("requests/s")
    is_time = name.endswith("_seconds")
    for contender in document["contenders"]:
        colour, marker = _STYLES.get(contender, ("#999999", "o"))
        rows = [r for r in document["rows"] if r["contender"] == contender and r["repeats"]]
        windows = [w for w in document["windows"] if w["contender"] == contender]
        means = [row[name]["mean"] for row in rows]
        axes.plot([row["rate"] for row in rows], means, color=colour, label=contender)
        points = {"color": colour, "marker": marker, "s": 14, "alpha": 0.6}
        axes.scatter([w["rate"] for w in windows], [w[name] for w in windows], **points)
    if is_time:
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")  # 0.2 instead of 2 x 10^-1
        axes.minorticks_off()
    if name.startswith("ttft"):
        objective = document["ttft_objective_seconds"]
        axes.axhline(objective, color="black", linewidth=0.8, linestyle=":")
    if not is_time:
        rates = [row["rate"] for row in document["rows"]]
        axes.plot(rates, rates, color="black", linewidth=0.8, linestyle=":", label="as offered")
        axes.legend(frameon=False, fontsize="small")
