"""What README.md and docs/results.md have from the JSON of benchmarks.

    python -m docs.generate.results     # brings both up to date

A cell claims no more than its range: see ``_claim``.
"""

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from docs.generate.figures import (
    RESULTS,
    TRAFFIC,
    estimate,
    path_rows,
    percent,
    percent_of,
    read_document,
    read_rows,
    rest_mark,
    rounds,
)
from docs.generate.reference import table, table_in, with_table
from ultraep_lab.bench.load_report import _crossing
from ultraep_lab.bench.prefill import WITHOUT_EP

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
    """A page with the two tables of results. Raises ValueError where one has no place."""
    for name, made in (("results", _results()), ("instruction-sets", _instruction_sets())):
        table_in(text, name)
        text = with_table(text, name, made)
    return text


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


def _instruction_sets() -> str:
    """What vLLM gains on CPUs with each instruction set, a column each."""
    return table(
        ("", *_INSTRUCTION_SETS),
        ((name, *map(figure, _INSTRUCTION_SETS)) for name, figure in _BY_INSTRUCTIONS.items()),
    )


def _by_instructions(base: str) -> Callable[[str], str]:
    return lambda instructions: _ttft(_INSTRUCTION_SETS[instructions], base)


def _experts_alone(instructions: str) -> str:
    """What experts with many rows take by the best exact way, over the engine's without EP."""
    ratios = []
    for found in read_document("expert-kernels-xeon")["findings"]:  # as the times of servers are
        kind = found["instructions"], found["dtype"], found["rows"]
        if kind == (instructions, "bfloat16", _MANY_ROWS):
            milliseconds = found["ms"]
            exact = [milliseconds[way] for way, is_exact in found["exact"].items() if is_exact]
            ratios.append(min(exact) / milliseconds["without EP"])
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else _NOT_MEASURED


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
    rows = read_rows(name)
    if base not in rows[0]["ttft_samples"]:
        return _NOT_MEASURED
    return "<br>".join(f"{row['prompt_tokens'] >> 10}k: {_faster_than(row, base)}" for row in rows)


def _faster_than(row: dict[str, Any], base: str) -> str:
    """How much faster ``quota`` is than ``base`` at one prompt length."""
    return _claim(rounds(row, base)) + rest_mark(row, base)


def _recorded(engine: str, base: str) -> str:
    """Of every recorded text, how much faster ``quota`` is than ``base``."""
    name = _RECORDED.get(engine)
    if name is None:
        return _NOT_MEASURED
    rows = read_rows(name)
    return "<br>".join(f"{TRAFFIC[row['workload']]}: {_faster_than(row, base)}" for row in rows)


def _recorded_over(base: str) -> Callable[[str], str]:
    return lambda engine: _recorded(engine, base)


def _recorded_path(part: str) -> Callable[[str], str]:
    """Of every recorded text, how much faster ``quota`` is than ``off`` by CPU time."""

    def shown(engine: str) -> str:
        if engine != _PATH_ENGINE:
            return _NOT_MEASURED
        return "<br>".join(
            f"{TRAFFIC[row['workload']]}: {percent_of(row['paired'][f'{part}_off_over_quota'])}"
            for row in path_rows()
            if row["ranks"] == _MANY_RANKS
        )

    return shown


def _recorded_imbalance(engine: str) -> str:
    name = _RECORDED.get(engine)
    if name is None:
        return _NOT_MEASURED
    return "<br>".join(
        f"{TRAFFIC[workload]}: {found['before']:.2f}, {found['quota']:.3f}"
        for workload, found in read_document(name)["imbalance"].items()
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
    pairs = [(one["rate"], other["rate"]) for one, other in zip(ours, others, strict=True)]
    return _NOT_REACHED if None in sum(pairs, ()) else _claim(pairs)


def _imbalance(engine: str) -> str:
    found = read_document(f"{engine}-ttft")["imbalance"]
    return f"{found['before']['mean']:.2f}, {found['after']['mean']:.3f}"


def _load(engine: str) -> dict[str, Any]:
    return read_document(_LOADS[engine])


_RATES = {"serving": 4.0, "sglang": 3.0}  # requests/s, the middle of what was measured
_MANY_RANKS, _PATH_ENGINE = 8, "serving"
_LIMIT = 0.5  # seconds of mean time to first token
_MANY_ROWS = 512  # of an expert
_INSTRUCTION_SETS = {  # the times that were measured with each
    "AVX2": "serving-ttft-avx2",
    "AVX512": "serving-ttft-avx512",
    "AVX512-BF16": "serving-ttft-avx512-bf16",
    "AMX": "serving-ttft-amx",
}
_BY_INSTRUCTIONS: dict[str, Callable[[str], str]] = {
    "the same server without balancing": _by_instructions("off"),
    "the engine without expert parallelism": _by_instructions(WITHOUT_EP),
    "forced perfect balance, the limit": _by_instructions("ideal"),
    "time of the experts alone, engine without expert parallelism = 1": _experts_alone,
}
_RESULTS: dict[str, dict[str, Callable[[str], str]]] = {
    "Time to first token with recorded routing, 4k tokens of each text: faster than": {
        "the same server without balancing": _recorded_over("off"),
        "the engine without expert parallelism": _recorded_over(WITHOUT_EP),
        "forced perfect balance, the limit": _recorded_over("ideal"),
    },
    f"Critical path of {_MANY_RANKS} ranks with recorded routing, by CPU time: faster than": {
        "experts without balancing": _recorded_path("experts"),
        "all layers without balancing": _recorded_path("path"),
    },
    "Work of the busiest of two ranks over the mean with recorded routing": {
        "before, after": _recorded_imbalance,
    },
    "Time to first token with skewed routing, by tokens of the prompt: faster than": {
        "the same server without balancing": _ttft_over("off"),
        "the engine without expert parallelism": _ttft_over(WITHOUT_EP),
        "forced perfect balance, the limit": _ttft_over("ideal"),
        "without balancing, where the model is balanced already": _balanced,
    },
    "Mean time to first token at 4 (SGLang: 3) requests/s: faster than": {
        "the same server without balancing": _loaded("ttft_mean_seconds", "off"),
        "the engine without expert parallelism": _loaded("ttft_mean_seconds", "without-ep"),
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
