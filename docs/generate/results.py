"""What README.md and docs/results.md have from the JSON of benchmarks.

    python -m docs.generate.results     # brings both up to date

A cell claims no more than its range: see ``_claim``.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.generate.figures import (
    RESULTS,
    TRAFFIC,
    estimate,
    percent,
    read_document,
    read_rows,
    rounds,
)
from docs.generate.reference import table, table_in, with_table

__all__ = ["PAGE", "README", "readme", "results"]

_ROOT = Path(__file__).resolve().parents[2]
README = _ROOT / "README.md"
PAGE = _ROOT / "docs" / "results.md"
_ENGINES = ("serving", "sglang")  # how the names of JSON files begin
_LOADS = {"serving": "load-vllm", "sglang": "load-sglang"}
_RECORDED = {"serving": "real-routing-ttft", "sglang": "real-routing-ttft-sglang"}
_NOT_MEASURED = "not measured"
_NOT_REACHED = "beyond the measured rates"
_DEMO = re.compile(r"^╭.*?╯$", re.MULTILINE | re.DOTALL)
_WIDTH = 80
_NARROW = 0.1  # a range that shows two times to be alike


def readme(text: str) -> str:
    """README.md with what the demo printed, and its table of results.

    Raises ValueError where one of them has no place.
    """
    text, found = _DEMO.subn(lambda _: _demo(), text)
    if found != 1:
        raise ValueError(f"README.md has {_DEMO.pattern!r} {found} times")
    return results(text)


def results(text: str) -> str:
    """A page with the table of results. Raises ValueError where it has no place."""
    table_in(text, "results")
    return with_table(text, "results", _results())


def _demo() -> str:
    """What the demo printed, without spaces at the ends of lines."""
    from rich.console import Console

    from ultraep_lab.demo.report import demo_view

    shown = Console(width=_WIDTH, file=(printed := io.StringIO()))
    shown.print(demo_view(json.loads((RESULTS / "demo.json").read_text())))
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _results() -> str:
    """One row for each comparison, one column for each engine; all say how much better we are."""
    rows: list[tuple[str, ...]] = []
    for head, figures in _RESULTS.items():
        rows.append((f"**{head}**", "", ""))
        rows += [(name, *map(figure, _ENGINES)) for name, figure in figures.items()]
    return table(("", "vLLM", "SGLang"), rows)


def _claim(pairs: Sequence[tuple[float, float]]) -> str:
    """By how much the second of each pair of times is shorter, as "x % faster" has it.

    Where the range has both faster and slower ones there is nothing to claim.
    """
    median, low, high = estimate(pairs)
    shown = percent(median, low, high)
    if low > 1 or high < 1:
        return shown
    return f"{'level' if high - low < _NARROW else 'unclear'} {shown[shown.index('(') :]}"


def _ttft(name: str, base: str) -> str:
    """Of every prompt length, how much faster ``quota`` is than ``base``."""
    return "<br>".join(
        f"{row['prompt_tokens'] >> 10}k: {_claim(rounds(row, base))}" for row in read_rows(name)
    )


def _recorded(engine: str, base: str) -> str:
    """Of every recorded text, how much faster ``quota`` is than ``base``."""
    rows = read_rows(_RECORDED[engine])
    return "<br>".join(f"{TRAFFIC[row['workload']]}: {_claim(rounds(row, base))}" for row in rows)


def _recorded_over(base: str) -> Callable[[str], str]:
    return lambda engine: _recorded(engine, base)


def _recorded_imbalance(engine: str) -> str:
    return "<br>".join(
        f"{TRAFFIC[workload]}: {found['before']:.2f}, {found['quota']:.3f}"
        for workload, found in read_document(_RECORDED[engine])["imbalance"].items()
    )


def _ttft_over(base: str) -> Callable[[str], str]:
    return lambda engine: _ttft(f"{engine}-ttft", base)


def _balanced(engine: str) -> str:
    return _ttft(f"{engine}-balanced", "off")


def _windows(document: dict[str, Any], contender: str) -> list[list[dict[str, Any]]]:
    """Of one contender, by repeat, in the order of rates."""
    windows = [w for w in document["windows"] if w["contender"] == contender]
    repeats = sorted({window["repeat"] for window in windows})
    in_order = sorted(windows, key=lambda window: float(window["rate"]))
    return [[w for w in in_order if w["repeat"] == repeat] for repeat in repeats]


def _at_rate(document: dict[str, Any], rate: float, figure: str, base: str) -> str:
    """How much faster ``quota`` is than ``base`` at one rate."""
    if base not in document["contenders"]:
        return _NOT_MEASURED
    others, ours = (
        [w[figure] for windows in _windows(document, name) for w in windows if w["rate"] == rate]
        for name in (base, "quota")
    )
    return _claim(list(zip(others, ours, strict=True)))


def _loaded(figure: str, base: str) -> Callable[[str], str]:
    return lambda engine: _at_rate(_load(engine), _RATES[engine], figure, base)


def _more_requests(engine: str) -> str:
    """How many more requests per second ``quota`` serves than ``off`` within ``_LIMIT``."""
    ours, others = (
        [
            _crossing([(w["rate"], w["ttft_mean_seconds"]) for w in windows], _LIMIT)
            for windows in _windows(_load(engine), name)
        ]
        for name in ("quota", "off")
    )
    pairs = list(zip(ours, others, strict=True))
    return _NOT_REACHED if None in sum(pairs, ()) else _claim(pairs)


def _crossing(curve: Sequence[tuple[float, float]], limit: float) -> float | None:
    """The rate at which ``curve`` passes ``limit``, on a straight line between two of its points.

    None where that is outside the rates that were measured.
    """
    for (rate, before), (next_rate, after) in pairwise(curve):
        if before <= limit < after:
            return rate + (limit - before) / (after - before) * (next_rate - rate)
    return None


def _imbalance(engine: str) -> str:
    found = read_document(f"{engine}-ttft")["imbalance"]
    return f"{found['before']['mean']:.2f}, {found['after']['mean']:.3f}"


def _load(engine: str) -> dict[str, Any]:
    return read_document(_LOADS[engine])


_RATES = {"serving": 4.0, "sglang": 3.0}  # requests/s, the middle of what was measured
_LIMIT = 0.5  # seconds of mean time to first token
_RESULTS: dict[str, dict[str, Callable[[str], str]]] = {
    "Time to first token with recorded routing, 4k tokens of each text: faster than": {
        "the same server without balancing": _recorded_over("off"),
        "forced perfect balance, the limit": _recorded_over("ideal"),
    },
    "Work of the busiest of two ranks over the mean with recorded routing": {
        "before, after": _recorded_imbalance,
    },
    "Time to first token with skewed routing, by tokens of the prompt: faster than": {
        "the same server without balancing": _ttft_over("off"),
        "forced perfect balance, the limit": _ttft_over("ideal"),
        "without balancing, where the model is balanced already": _balanced,
    },
    "Mean time to first token at 4 (SGLang: 3) requests/s: faster than": {
        "the same server without balancing": _loaded("ttft_mean_seconds", "off"),
        "the engine's own balancer (EPLB)": _loaded("ttft_mean_seconds", "sglang-eplb"),
    },
    "Time between tokens (99th percentile) at that rate: faster than": {
        "the same server without balancing": _loaded("itl_p99_seconds", "off"),
    },
    f"Requests/s with a mean time to first token of {_LIMIT} s: more than": {
        "the same server without balancing": _more_requests,
    },
    "Work of the busiest rank over the mean with skewed routing; 1 is perfect": {
        "before, after": _imbalance,
    },
}


def main() -> None:
    """Write both."""
    for path, updated in ((README, readme), (PAGE, results)):
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()
