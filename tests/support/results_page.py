"""The figures of README.md and docs/dev/measurements.md that come from the JSON of benchmarks.

    python -m tests.support.results_page     # brings both up to date

A table of times stands between ``<!-- NAME -->`` and ``<!-- end -->``, NAME being its JSON's.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ultraep_kernels.contract import FULL_SPEED

from tests.support.reference_page import table, with_table
from ultraep_serve.lab.bench.load_report import rate_text, ratio_text
from ultraep_serve.lab.bench.prefill import WITHOUT_EP

__all__ = [
    "LOADS",
    "MEASUREMENTS",
    "README",
    "RESULTS",
    "SIMULATION",
    "SPEEDS",
    "TIMES",
    "WINDOWS",
    "measurements",
    "readme",
    "times",
]

_ROOT = Path(__file__).resolve().parents[2]
README = _ROOT / "README.md"
MEASUREMENTS = _ROOT / "docs" / "dev" / "measurements.md"
RESULTS = _ROOT / "benchmarks" / "results"
TIMES = ("serving-ttft", "serving-ttft-amx", "serving-balanced", "sglang-ttft", "sglang-balanced")
SPEEDS = "speeds"
LOADS = ("load-vllm", "load-sglang")
WINDOWS = ("load-vllm-balanced", "load-vllm-bursts", "load-sglang-decode")  # tables alone
SIMULATION = "simulation"
_ENGINES = ("serving", "sglang")  # how the names of JSON files begin
_VARIANTS = {"off": "off", "quota": "quota", "ideal": "ideal", WITHOUT_EP: "without EP"}
_CONTENDERS = {
    "off": "off",
    "without-ep": "without EP",
    "sglang-eplb": "SGLang's EPLB",
    "quota": "quota",
    "ideal": "ideal",
}
_FIGURES = {"ttft_mean_seconds": "mean TTFT", "ttft_p99_seconds": "P99 TTFT"}
_NOT_MEASURED = "not measured"
_DEMO = re.compile(r"^╭.*?╯$", re.MULTILINE | re.DOTALL)
_WIDTH = 80


def readme(text: str) -> str:
    """README.md with what the demo printed, and the rows of its table that come from times.

    Raises ValueError where one of them has no place.
    """
    made = {_DEMO: _demo()}
    for name, figures in _ROWS.items():
        row = "".join(f" {cell} |" for cell in (name, *map(figures, _ENGINES)))
        made[re.compile(rf"^\| {re.escape(name)} \|.*$", re.MULTILINE)] = f"|{row}"
    for place, content in made.items():
        text, found = place.subn(lambda _, content=content: content, text)
        if found != 1:
            raise ValueError(f"README.md has {place.pattern!r} {found} times")
    return text


def measurements(text: str) -> str:
    """docs/dev/measurements.md with its tables: times, speeds, load, and what was simulated."""
    for name in TIMES:
        text = with_table(text, name, times(name))
    text = with_table(text, SPEEDS, _by_time())
    for name in LOADS:
        text = with_table(text, name, _under_load(name))
        text = with_table(text, f"{name}-rates", _greatest_rates(name))
    for name in WINDOWS:
        text = with_table(text, name, _under_load(name))
    return with_table(text, SIMULATION, _simulated())


def times(name: str) -> str:
    """Times of every variant that was measured, and their ratios."""
    rows = _rows(name)
    variants = [variant for variant in _VARIANTS if variant in rows[0]["ttft_seconds"]]
    ratios = [head for head, ratio in _ratios(rows[0]).items() if ratio is not None]
    head = ("prompt tokens", *(_VARIANTS[variant] for variant in variants), *ratios)
    return table(
        head,
        (
            (
                str(row["prompt_tokens"]),
                *(f"{row['ttft_seconds'][variant]:.2f} s" for variant in variants),
                *(str(_ratios(row)[head]) for head in ratios),
            )
            for row in rows
        ),
    )


def _ratios(row: dict[str, Any]) -> dict[str, str | None]:
    """By the head of their column; None for what was not measured."""
    has_ideal = row["recovered"] is not None
    return {
        "off / quota": f"{row['speedup']:.2f}" if has_ideal else None,
        "ideal / quota": f"{row['efficiency']:.3f}" if has_ideal else None,
        "of the gap closed": f"{row['recovered']:.2f}" if has_ideal else None,
        "quota / off, by round": None if has_ideal else _paired(row, "quota_over_off"),
        "quota / without EP, by round": _paired(row, f"quota_over_{WITHOUT_EP}"),
    }


def _paired(row: dict[str, Any], name: str) -> str | None:
    """Median and, where known, its confidence interval."""
    if (paired := row["paired"].get(name)) is None:
        return None
    interval = paired.get("interval")
    within = f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    return f"{paired['median']:.3f}{within}"


def _by_time() -> str:
    """Both cores free, and one of them half busy."""
    found = _document(SPEEDS)
    head = (
        "cores", "prompt tokens", "by count", "by time", "by count / by time, by round",
        "speeds that plans by time had",
    )  # fmt: skip
    rows = []
    for cores, phase in (("free", "free"), ("one half busy", "busy")):
        for row in found[phase]:
            unequal = row["median_speeds_where_unequal"]
            speeds = [speed / FULL_SPEED for speed in unequal or ()]
            ratio = row["by_count_over_by_time"]
            rows.append(
                (
                    cores,
                    str(row["prompt_tokens"]),
                    f"{row['by_count_seconds']['median']:.2f} s",
                    f"{row['by_time_seconds']['median']:.2f} s",
                    "{:.3f} ({:.3f} to {:.3f})".format(ratio["median"], *ratio["interval"]),
                    ", ".join(f"{speed:.2f}" for speed in speeds) or "equal",
                )
            )
    return table(head, rows)


def _under_load(name: str) -> str:
    """Every contender at every rate; means over repeats."""
    document = _document(name)
    bases = next(list(row["over"]) for row in document["rows"] if row["over"])
    heads = [f"quota / {_CONTENDERS[base]}: mean TTFT, P99 TTFT, P99 ITL" for base in bases]
    head = ("requests/s", "", "TTFT: mean, P50, P90, P99", "P99 ITL", "goodput", *heads)
    rows = []
    for row in document["rows"]:
        times = [row[f"ttft_{name}_seconds"]["mean"] for name in ("mean", "p50", "p90", "p99")]
        rows.append(
            (
                f"{row['rate']:g}",
                _CONTENDERS[row["contender"]],
                ", ".join(f"{seconds:.2f}" for seconds in times) + " s",
                f"{1000 * row['itl_p99_seconds']['mean']:.0f} ms",
                f"{row['goodput_per_second']['mean']:.2f}/s",
                *(_load_ratios(row["over"].get(base)) for base in bases),
            )
        )
    return table(head, rows)


def _load_ratios(over: dict[str, Any] | None) -> str:
    figures = ("ttft_mean_seconds", "ttft_p99_seconds", "itl_p99_seconds")
    return ", ".join(ratio_text(over[figure]) for figure in figures) if over else ""


def _greatest_rates(name: str) -> str:
    """Up to which rate each contender stays within each limit, where one of them passes it."""
    document = _document(name)
    contenders = document["contenders"]
    bases = list(document["greatest_rates"][0]["quota_over"])
    head = (
        "limit",
        *(_CONTENDERS[contender] for contender in contenders),
        *(f"quota / {_CONTENDERS[base]}" for base in bases),
    )
    rows = [
        (
            f"{_FIGURES[found['figure']]} {found['limit_seconds']:g} s",
            *(rate_text(found["rates"][contender]) for contender in contenders),
            *(ratio_text(ratio) if ratio else "" for ratio in found["quota_over"].values()),
        )
        for found in document["greatest_rates"]
        if len({rate["is"] for rate in found["rates"].values()} - {"above"})
    ]
    return table(head, rows)


def _simulated() -> str:
    """Every variant of every setting."""
    head = (
        "setting", "variant", "planned layers", "before: 1 %, 50 %, 99 %, worst", "floor: 50 %",
        "after: 50 %, 99 %, worst", "busiest link: 50 %, 99 %", "plans that pay", "gain",
        "plan: 50 %, 99 %",
    )  # fmt: skip
    rows = []
    for name, found in _document(SIMULATION)["settings"].items():
        plans = found["plan_seconds"]["variants"]
        for row, plan in zip(found["variants"], plans, strict=True):
            balance = row.get("time_imbalance", row["imbalance"])
            link = [row["busiest_link_bytes"][key] / (1 << 20) for key in ("p50", "p99")]
            rows.append(
                (
                    name,
                    row["name"],
                    f"{row['planned_layers']} of {row['layers']}",
                    ", ".join(f"{balance['before'][key]:.2f}" for key in balance["before"]),
                    f"{balance['floor']['p50']:.3f}",
                    ", ".join(f"{balance['after'][key]:.3f}" for key in ("p50", "p99", "worst")),
                    "{:.0f}, {:.0f} MiB".format(*link),
                    f"{100 * row['followed']:.0f} %",
                    f"{row['predicted_gain']:.2f}",
                    f"{plan['p50'] * 1e6:.0f}, {plan['p99'] * 1e6:.0f} us",
                )
            )
    return table(head, rows)


def _demo() -> str:
    """What the demo printed, without spaces at the ends of lines."""
    from rich.console import Console

    from ultraep_serve.lab.demo.report import demo_view

    shown = Console(width=_WIDTH, file=(printed := io.StringIO()))
    shown.print(demo_view(json.loads((RESULTS / "demo.json").read_text())))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _speedup(engine: str) -> str:
    return _listed([row["speedup"] for row in _rows(f"{engine}-ttft")])


def _over_without_ep(engine: str) -> str:
    pairs = [row["paired"].get(f"quota_over_{WITHOUT_EP}") for row in _rows(f"{engine}-ttft")]
    return _listed([pair["median"] for pair in pairs if pair])


def _recovered(engine: str) -> str:
    shares = [100 * row["recovered"] for row in _rows(f"{engine}-ttft")]
    return f"{min(shares):.0f} to {max(shares):.0f} %"


def _imbalance(engine: str) -> str:
    found = _document(f"{engine}-ttft")["imbalance"]
    return f"{found['before']['mean']:.2f}, {found['after']['mean']:.3f}"


def _cost(engine: str) -> str:
    pairs = [row["paired"]["quota_over_off"]["median"] for row in _rows(f"{engine}-balanced")]
    return f"{min(pairs):.3f} to {max(pairs):.3f}"


def _more_requests(engine: str) -> str:
    """Against ``off`` and the engine alone, for the first limit that all repeats pass."""
    for found in _load(engine)["greatest_rates"]:
        ratios = [found["quota_over"][base] for base in ("off", "without-ep")]
        if None not in ratios:
            limit = f"{_FIGURES[found['figure']]} {found['limit_seconds']:g} s"
            shown = ("{:.2f} ({:.2f}-{:.2f})".format(r["mean"], *r["interval"]) for r in ratios)
            return f"{', '.join(shown)}; {limit}"
    return _NOT_MEASURED


def _pauses(engine: str) -> str:
    rows = [row for row in _load(engine)["rows"] if row["contender"] == "quota"]
    ratios = [row["over"]["off"]["itl_p99_seconds"]["mean"] for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _load(engine: str) -> dict[str, Any]:
    return _document(LOADS[_ENGINES.index(engine)])


_ROWS: dict[str, Callable[[str], str]] = {
    "time to first token, off / on, at 2k, 4k, 8k tokens": _speedup,
    "on / without expert parallelism (the engine alone)": _over_without_ep,
    "of what perfect balance would gain": _recovered,
    "imbalance (max/mean) before, after": _imbalance,
    "a model that is balanced already, on / off": _cost,
    "requests/s within a limit, on / off, on / without EP": _more_requests,
    "P99 inter-token latency, on / off": _pauses,
}


def _listed(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios) or _NOT_MEASURED


def _rows(name: str) -> list[dict[str, Any]]:
    return list(_document(name)["rows"])


def _document(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def main() -> None:
    """Write both pages."""
    for path, updated in ((README, readme), (MEASUREMENTS, measurements)):
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()
