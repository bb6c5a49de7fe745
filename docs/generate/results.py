"""What README.md, docs/results.md and docs/dev/measurements.md have from the JSON of benchmarks.

    python -m docs.generate.results     # brings all of them up to date

Every ratio of the first two is estimated in one way: see ``_estimate``. A table of times stands
between ``<!-- NAME -->`` and ``<!-- end -->``, NAME being its JSON's.
"""

import io
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ultraep_kernels.contract import FULL_SPEED

from docs.generate.reference import table, table_in, with_table
from ultraep_serve.lab.bench.load_report import _crossing, rate_text, ratio_text
from ultraep_serve.lab.bench.prefill import WITHOUT_EP, median_interval

__all__ = [
    "AGENTS",
    "LOADS",
    "MEASUREMENTS",
    "PATHS",
    "README",
    "RESULTS",
    "RESULTS_PAGE",
    "SIMULATION",
    "SPEEDS",
    "TIMES",
    "WINDOWS",
    "measurements",
    "readme",
    "results",
    "times",
]

_ROOT = Path(__file__).resolve().parents[2]
README = _ROOT / "README.md"
MEASUREMENTS = _ROOT / "docs" / "dev" / "measurements.md"
RESULTS_PAGE = _ROOT / "docs" / "results.md"
RESULTS = _ROOT / "benchmarks" / "results"
TIMES = (
    *("serving-ttft", "serving-ttft-avx512", "serving-ttft-avx2", "serving-ttft-amx"),
    *("serving-balanced", "sglang-ttft", "sglang-balanced", "real-routing-ttft"),
)
PATHS = "real-routing-path"
REAL_ROUTING = {"serving": "real-routing-ttft"}  # by engine
SPEEDS = "speeds"
LOADS = ("load-vllm", "load-sglang")
WINDOWS = ("load-vllm-balanced", "load-vllm-bursts", "load-sglang-decode")  # tables alone
AGENTS = "agents-vllm"
SIMULATION = "simulation"
_ENGINES = ("serving", "sglang")  # how the names of JSON files begin
_VARIANTS = {"off": "off", "quota": "quota", "ideal": "ideal", WITHOUT_EP: "without EP"}
_TRAFFIC = {"law": "law", "intent": "intent", "switch": "law, then intent"}
_CONTENDERS = {
    "off": "off",
    "without-ep": "without EP",
    "sglang-eplb": "SGLang's EPLB",
    "quota": "quota",
    "ideal": "ideal",
}
_AGENTS_FASTER = {
    "ttft_p50_seconds": "P50 TTFT",
    "ttft_p99_seconds": "P99 TTFT",
    "itl_p50_seconds": "P50 ITL",
    "itl_p99_seconds": "P99 ITL",
}
_FIGURES = {"ttft_mean_seconds": "mean TTFT", "ttft_p99_seconds": "P99 TTFT"}
_NOT_MEASURED = "not measured"
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


def measurements(text: str) -> str:
    """docs/dev/measurements.md with its tables: times, speeds, load, and what was simulated."""
    for name in TIMES:
        text = with_table(text, name, times(name))
    text = with_table(text, PATHS, _critical_paths())
    text = with_table(text, SPEEDS, _by_time())
    for name in LOADS:
        text = with_table(text, name, _under_load(name))
        text = with_table(text, f"{name}-rates", _greatest_rates(name))
    for name in WINDOWS:
        text = with_table(text, name, _under_load(name))
    text = with_table(text, AGENTS, _agents())
    return with_table(text, SIMULATION, _simulated())


def times(name: str) -> str:
    """Median times of every variant that was measured, and how much faster ``quota`` is."""
    rows = _rows(name)
    traffic = "workload" in rows[0]
    variants = [variant for variant in _VARIANTS if variant in rows[0]["ttft_seconds"]]
    others = [variant for variant in variants if variant != "quota"]
    faster = (f"quota is faster than {_VARIANTS[variant]} by" for variant in others)
    return table(
        (
            *(("traffic",) if traffic else ()),
            *("prompt tokens", *(_VARIANTS[variant] for variant in variants), *faster),
        ),
        (
            (
                *((_TRAFFIC[row["workload"]],) if traffic else ()),
                str(row["prompt_tokens"]),
                *(f"{row['ttft_seconds'][variant]:.2f} s" for variant in variants),
                *(_faster_than(row, variant) for variant in others),
            )
            for row in rows
        ),
    )


def _faster_than(row: dict[str, Any], base: str) -> str:
    """How much faster ``quota`` is than ``base`` at one prompt length."""
    return _percent(*_estimate(_rounds(row, base)))


def _rounds(row: dict[str, Any], base: str) -> list[tuple[float, float]]:
    """Times of ``base`` and of ``quota`` at one prompt length."""
    samples = row["ttft_samples"]
    return list(zip(samples[base], samples["quota"], strict=True))


def _path_rows() -> list[dict[str, Any]]:
    """Of all numbers of ranks, each of which has a file."""
    rows = [row for path in RESULTS.glob(f"{PATHS}-*.json") for row in _rows(path.stem)]
    return sorted(rows, key=lambda row: int(row["ranks"]))


def _critical_paths() -> str:
    """Of every number of ranks: loads, times by CPU time, and how much faster ``quota`` is."""
    head = (
        *("ranks", "traffic", "prompt tokens", "busiest over mean: before, after"),
        *("experts: off, quota, ideal", "all: off, quota, ideal"),
        *("quota is faster than off by: experts", "MoE layers", "all", "than ideal by: all"),
    )
    rows = []
    for row in _path_rows():
        times = row["milliseconds"]
        paired = row["paired"]
        ratios = (
            *("experts_off_over_quota", "moe_off_over_quota", "path_off_over_quota"),
            "path_ideal_over_quota",
        )
        rows.append(
            (
                str(row["ranks"]),
                _TRAFFIC[row["workload"]],
                str(row["prompt_tokens"]),
                f"{row['imbalance']['before']:.2f}, {row['imbalance']['quota']:.3f}",
                *(
                    ", ".join(f"{times[policy][part]:.0f}" for policy in times) + " ms"
                    for part in ("experts", "path")
                ),
                *(_ratio(paired[ratio]) for ratio in ratios),
            )
        )
    return table(head, rows)


def _by_time() -> str:
    """Both cores free, and one of them half busy."""
    found = _document(SPEEDS)
    head = (
        "cores", "prompt tokens", "by count", "by time", "by time is faster by",
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
                    _percent(ratio["median"], *ratio["interval"]),
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


def _agents() -> str:
    """Every contender's times and goodput; means over repeats."""
    document = _document(AGENTS)
    head = (
        "", "TTFT: P50, P90, P99", "ITL: P50, P90, P99", "within 1, 2, 3, 4 times both limits",
        "goodput",
        *(f"quota is faster by: {figure}" for figure in _AGENTS_FASTER.values()),
    )  # fmt: skip
    rows = []
    for row in document["rows"]:
        ttft, itl = (
            [row[f"{name}_{part}_seconds"] for part in ("p50", "p90", "p99")]
            for name in ("ttft", "itl")
        )
        rows.append(
            (
                _CONTENDERS[row["contender"]],
                ", ".join(f"{seconds:.2f}" for seconds in ttft) + " s",
                ", ".join(f"{1000 * seconds:.0f}" for seconds in itl) + " ms",
                ", ".join(f"{100 * row['good_share'][scale]:.0f}" for scale in "1234") + " %",
                f"{row['goodput_per_second']:.2f}/s",
                *(
                    _percent(*_estimate(_pairs(document, row["contender"], figure)))
                    if row["contender"] != "quota"
                    else ""
                    for figure in _AGENTS_FASTER
                ),
            )
        )
    return table(head, rows)


def _pairs(document: dict[str, Any], base: str, figure: str) -> list[tuple[float, float]]:
    """A contender's and quota's, by repeat."""
    windows = document["windows"]
    others, ours = (
        {window["repeat"]: window[figure] for window in windows if window["contender"] == name}
        for name in (base, "quota")
    )
    return [(others[repeat], ours[repeat]) for repeat in sorted(others.keys() & ours.keys())]


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
        (
            (name, *(figure(*column) for column in _INSTRUCTION_SETS.values()))
            for name, figure in _BY_INSTRUCTIONS.items()
        ),
    )


def _experts_alone(_times: str, served: tuple[str, str]) -> str:
    """What experts with many rows take by the best exact way, over the engine's without EP."""
    ratios = []
    for found in _document("expert-kernels")["findings"]:
        if (found["instructions"], found["dtype"], found["rows"]) == (*served, _MANY_ROWS):
            milliseconds = found["ms"]
            exact = [milliseconds[way] for way, is_exact in found["exact"].items() if is_exact]
            ratios.append(min(exact) / milliseconds["without EP"])
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else _NOT_MEASURED


def _by_instructions(base: str) -> Callable[[str, tuple[str, str]], str]:
    return lambda times, _served: _ttft(times, base)


def _estimate(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median of the ratios within rounds, and where it lies with 95 % confidence.

    Fewer than six rounds have no interval: then it is the least and the greatest ratio.
    """
    ratios = [one / other for one, other in pairs]
    return statistics.median(ratios), *(median_interval(ratios) or (min(ratios), max(ratios)))


def _claim(pairs: Sequence[tuple[float, float]]) -> str:
    """By how much the second of each pair of times is shorter, as "x % faster" has it.

    Where the range has both faster and slower ones there is nothing to claim.
    """
    median, low, high = _estimate(pairs)
    shown = _percent(median, low, high)
    if low > 1 or high < 1:
        return shown
    return f"{'level' if high - low < _NARROW else 'unclear'} {shown[shown.index('(') :]}"


def _percent(median: float, low: float, high: float) -> str:
    """Ratios above 1 as "x % more"."""
    shown = (f"{round(100 * (ratio - 1))}" for ratio in (median, low, high))
    return "{} % ({} to {})".format(*shown)


def _ratio(found: dict[str, Any]) -> str:
    """As ``_percent`` says it, of a JSON's ratio, whose interval may be missing."""
    return _percent(found["median"], *(found["interval"] or (found["min"], found["max"])))


def _ttft(name: str, base: str) -> str:
    """Of every prompt length, how much faster ``quota`` is than ``base``."""
    rows = _rows(name)
    if base not in rows[0]["ttft_samples"]:
        return _NOT_MEASURED
    return "<br>".join(
        f"{row['prompt_tokens'] >> 10}k: {_claim(_rounds(row, base))}" for row in rows
    )


def _recorded(engine: str, base: str) -> str:
    """Of every recorded text, how much faster ``quota`` is than ``base``."""
    name = REAL_ROUTING.get(engine)
    if name is None:
        return _NOT_MEASURED
    rows = _rows(name)
    return "<br>".join(f"{_TRAFFIC[row['workload']]}: {_claim(_rounds(row, base))}" for row in rows)


def _recorded_over(base: str) -> Callable[[str], str]:
    return lambda engine: _recorded(engine, base)


def _recorded_path(part: str) -> Callable[[str], str]:
    """Of every recorded text, how much faster ``quota`` is than ``off`` by CPU time."""

    def shown(engine: str) -> str:
        rows = [row for row in _path_rows() if row["ranks"] == _MANY_RANKS]
        ratios = [
            f"{_TRAFFIC[row['workload']]}: {_ratio(row['paired'][f'{part}_off_over_quota'])}"
            for row in rows
        ]
        return "<br>".join(ratios) if engine == _ENGINES[0] else _NOT_MEASURED

    return shown


def _recorded_imbalance(engine: str) -> str:
    name = REAL_ROUTING.get(engine)
    if name is None:
        return _NOT_MEASURED
    return "<br>".join(
        f"{_TRAFFIC[workload]}: {found['before']:.2f}, {found['quota']:.3f}"
        for workload, found in _document(name)["imbalance"].items()
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


def _loaded_without_ep(engine: str) -> str:
    """SGLang's is of the run in which a step of decode adds ranks up once, as it does today."""
    document = _document(WINDOWS[-1]) if engine == "sglang" else _load(engine)
    return _at_rate(document, _RATES[engine], "ttft_mean_seconds", "without-ep")


def _more_requests(engine: str) -> str:
    """How many more requests per second ``quota`` serves than ``off`` within ``_LIMIT``."""
    ours, others = (
        [
            _crossing([(w["rate"], w["ttft_mean_seconds"]) for w in windows], _LIMIT)
            for windows in _windows(_load(engine), name)
        ]
        for name in ("quota", "off")
    )
    pairs = zip(ours, others, strict=True)
    return _claim([(one["rate"], other["rate"]) for one, other in pairs if one and other])


def _imbalance(engine: str) -> str:
    found = _document(f"{engine}-ttft")["imbalance"]
    return f"{found['before']['mean']:.2f}, {found['after']['mean']:.3f}"


def _load(engine: str) -> dict[str, Any]:
    return _document(LOADS[_ENGINES.index(engine)])


_RATES = {"serving": 4.0, "sglang": 3.0}  # requests/s, the middle of what was measured
_MANY_RANKS = 8
_LIMIT = 0.5  # seconds of mean time to first token
_MANY_ROWS = 512  # of an expert
_INSTRUCTION_SETS = {  # the times, and with which instructions and type experts were timed alone
    "AVX2": ("serving-ttft-avx2", ("AVX2", "bfloat16")),
    "AVX512": ("serving-ttft-avx512", ("AVX512", "bfloat16")),
    "AVX512-BF16": ("serving-ttft", ("AVX512-BF16", "bfloat16")),
    "AMX": ("serving-ttft-amx", ("AMX", "bfloat16")),
}
_BY_INSTRUCTIONS: dict[str, Callable[[str, tuple[str, str]], str]] = {
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
        "the engine without expert parallelism": _loaded_without_ep,
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


def _rows(name: str) -> list[dict[str, Any]]:
    return list(_document(name)["rows"])


def _document(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def main() -> None:
    """Write all of them."""
    for path, updated in ((README, readme), (RESULTS_PAGE, results), (MEASUREMENTS, measurements)):
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()
