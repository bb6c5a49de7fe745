"""What docs/dev/measurements.md has from the JSON of benchmarks.

    python -m docs.generate.measurements     # brings it up to date

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``, NAME being its JSON's.
"""

from pathlib import Path
from typing import Any

from ultraep_kernels.contract import FULL_SPEED

from docs.generate.figures import (
    PATHS,
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
from docs.generate.reference import table, with_table
from ultraep_lab.bench.load_report import rate_text, ratio_text
from ultraep_lab.bench.prefill import WITHOUT_EP

__all__ = ["PAGE", "TIMES", "measurements"]

PAGE = Path(__file__).resolve().parents[1] / "dev" / "measurements.md"
TIMES = (
    *("serving-ttft", "serving-ttft-avx512-epyc", "serving-ttft-avx2-epyc"),
    *("serving-ttft-avx2", "serving-ttft-avx512", "serving-ttft-avx512-bf16", "serving-ttft-amx"),
    *("serving-balanced", "serving-balanced-avx2", "serving-balanced-avx512"),
    *("serving-balanced-avx512-bf16", "serving-balanced-amx"),
    *("sglang-ttft", "sglang-ttft-amx", "sglang-balanced"),
    *("real-routing-ttft", "real-routing-ttft-sglang"),
)
SPEEDS = "speeds"
LOADS = ("load-vllm", "load-sglang")
WINDOWS = ("load-vllm-balanced", "load-vllm-bursts")  # tables alone
AGENTS = "agents-vllm"
ALLOCATORS = "serving-allocator"
KERNELS = ("expert-kernels", "expert-kernels-xeon")
SUMS, MIXED, TRANSPORTS = "expert-sums", "serving-mixed", "transport"
DECODES = ("serving-decode", "sglang-decode")
SIMULATION = "simulation"
_CORES = 2  # of the machine
_VARIANTS = {"off": "off", "quota": "quota", "ideal": "ideal", WITHOUT_EP: "without EP"}
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
    for name in DECODES:
        text = with_table(text, name, _decode(name))
    for name in KERNELS:
        text = with_table(text, name, _kernels(name))
    tables = (AGENTS, _agents), (SUMS, _sums), (MIXED, _mixed), (TRANSPORTS, _transports)
    for name, made in tables:
        text = with_table(text, name, made())
    text = with_table(text, ALLOCATORS, _allocators())
    return with_table(text, SIMULATION, _simulated())


def times(name: str) -> str:
    """Median times of every variant that was measured, and how much faster ``quota`` is."""
    rows = read_rows(name)
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
                *((TRAFFIC[row["workload"]],) if traffic else ()),
                str(row["prompt_tokens"]),
                *(f"{row['ttft_seconds'][variant]:.2f} s" for variant in variants),
                *(_faster_than(row, variant) for variant in others),
            )
            for row in rows
        ),
    )


def _faster_than(row: dict[str, Any], base: str) -> str:
    """How much faster ``quota`` is than ``base`` at one prompt length."""
    return percent(*estimate(rounds(row, base))) + rest_mark(row, base)


def _critical_paths() -> str:
    """Of every number of ranks: loads, times by CPU time, and how much faster ``quota`` is."""
    head = (
        *("ranks", "traffic", "prompt tokens", "busiest over mean: before, after"),
        *("experts: off, quota, ideal", "all: off, quota, ideal"),
        *("quota is faster than off by: experts", "MoE layers", "all", "than ideal by: all"),
        "path / clock: off, quota, ideal",
    )
    rows = []
    for row in path_rows():
        times = row["milliseconds"]
        paired = row["paired"]
        ratios = (
            *("experts_off_over_quota", "moe_off_over_quota", "path_off_over_quota"),
            "path_ideal_over_quota",
        )
        rows.append(
            (
                str(row["ranks"]),
                TRAFFIC[row["workload"]],
                str(row["prompt_tokens"]),
                f"{row['imbalance']['before']:.2f}, {row['imbalance']['quota']:.3f}",
                *(
                    ", ".join(f"{times[policy][part]:.0f}" for policy in times) + " ms"
                    for part in ("experts", "path")
                ),
                *(percent_of(paired[ratio]) for ratio in ratios),
                _of_the_clock(row),
            )
        )
    return table(head, rows)


def _of_the_clock(row: dict[str, Any]) -> str:
    """What the path is of the time that passed, where each rank had a core of its own."""
    if row["ranks"] > _CORES:
        return ""
    return ", ".join(f"{each['median']:.3f}" for each in row["path_over_clock"].values())


def _allocators() -> str:
    """Times to first token, and proportional set sizes of ranks behind them."""
    rows = []
    for row in read_rows(ALLOCATORS):
        samples = row["ttft_samples"]
        memory = {name: max(rank["Pss"] for rank in of) for name, of in row["ranks"].items()}
        rows.append(
            (
                str(row["prompt_tokens"]),
                *(f"{seconds:.3f} s" for seconds in row["ttft_seconds"].values()),
                percent(*estimate(list(zip(samples["glibc"], samples["tcmalloc"], strict=True)))),
                *(f"{size / 2**30:.2f} GiB" for size in memory.values()),
            )
        )
    head = ("glibc", "tcmalloc", "tcmalloc is faster by", "a rank: glibc", "a rank: tcmalloc")
    return table(("prompt tokens", *head), rows)


def _by_time() -> str:
    """Both cores free, and one of them half busy."""
    found = read_document(SPEEDS)
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
                    percent(ratio["median"], *ratio["interval"]),
                    ", ".join(f"{speed:.2f}" for speed in speeds) or "equal",
                )
            )
    return table(head, rows)


def _under_load(name: str) -> str:
    """Every contender at every rate; means over repeats."""
    document = read_document(name)
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
    document = read_document(name)
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
    document = read_document(AGENTS)
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
                    percent_of(row["over_quota"][figure]) if "over_quota" in row else ""
                    for figure in _AGENTS_FASTER
                ),
            )
        )
    return table(head, rows)


def _kernels(name: str) -> str:
    """What each way of computing experts in bfloat16 takes, relative to the engine without EP."""
    ways = ("kernel", "products", "float32", "tiles", "sums")
    return table(
        ("instructions", "experts (hidden, inner)", "rows of an expert", *ways),
        (
            (
                found["instructions"],
                f"{found['hidden']}, {found['inner']}",
                str(found["rows"]),
                *(
                    f"{found['ms'][way] / found['ms']['without EP']:.2f}"
                    if way in found["ms"]
                    else ""
                    for way in ways
                ),
            )
            for found in read_document(name)["findings"]
            if found["dtype"] == "bfloat16"
        ),
    )


def _sums() -> str:
    """What adding up takes of a layer, by the fastest way with each instruction set."""
    head = ("instructions", "way", "tokens", "layer", "of it sums", "sums in one pass / by torch")
    found = read_document(SUMS)["findings"]
    fastest = {}
    for one in found:
        key = one["instructions"], one["tokens"]
        if key not in fastest or one["ms"]["layer"] < fastest[key]["ms"]["layer"]:
            fastest[key] = one
    return table(
        head,
        (
            (
                instructions,
                one["way"],
                f"{tokens:,}",
                f"{one['ms']['layer']:.1f} ms",
                f"{_with_range(one['sums_over_layer'], 100, 1)} %",
                _with_range(one["sums_over_torch"], 1, 2),
            )
            for (instructions, tokens), one in fastest.items()
        ),
    )


def _decode(name: str) -> str:
    """A step of decode by the number of requests in it."""
    variants = ("off", "quota", WITHOUT_EP)
    head = (
        "requests", *(_VARIANTS[variant] for variant in variants), "quota / off",
        "quota / without EP", "experts read by the busiest rank / by both on average",
    )  # fmt: skip
    return table(
        head,
        (
            (
                str(row["requests"]),
                *(f"{1000 * row['step_seconds'][variant]:.1f} ms" for variant in variants),
                _with_range(row["paired"]["quota_over_off"], 1, 2),
                _with_range(row["paired"][f"quota_over_{WITHOUT_EP}"], 1, 2),
                "{busiest:.2f} / {mean:.2f} = {ratio:.2f}".format(**row["experts_read"]),
            )
            for row in read_rows(name)
        ),
    )


def _transports() -> str:
    """A layer of data-parallel ranks by what carries its tokens."""
    rows = read_rows(TRANSPORTS)
    gathered = list(rows[0]["over_rows"])
    head = (
        *("tokens of either rank", "as rows", *(f"gathered: {name}" for name in gathered)),
        *(f"{name} / as rows" for name in gathered),
    )
    return table(
        head,
        (
            (
                ", ".join(f"{number:,}" for number in row["tokens"]),
                *(f"{row['ms'][name]:.1f} ms" for name in ("rows", *gathered)),
                *(_with_range(row["over_rows"][name], 1, 2) for name in gathered),
            )
            for row in rows
        ),
    )


def _mixed() -> str:
    """Times between tokens while prompts arrive."""
    found = read_document(MIXED)
    figures = {"mean": "mean", "p50": "P50", "p90": "P90", "p99": "P99"}
    head = ("", *figures.values(), *(f"quota is faster by: {name}" for name in figures.values()))
    rows = []
    for variant, seconds in found["seconds"].items():
        ratios = found["ratios"].get(f"quota_over_{variant}")
        rows.append(
            (
                _VARIANTS[variant],
                *(f"{1000 * seconds[f'pause_{figure}']:.1f} ms" for figure in figures),
                *(_faster(ratios[f"pause_{figure}"]) if ratios else "" for figure in figures),
            )
        )
    return table(head, rows)


def _faster(quota_over_other: dict[str, Any]) -> str:
    median, (low, high) = quota_over_other["median"], quota_over_other["interval"]
    return percent(1 / median, 1 / high, 1 / low)


def _with_range(found: dict[str, Any], factor: int, digits: int) -> str:
    values = (found["median"], *found["interval"])
    return "{} ({} to {})".format(*(f"{factor * value:.{digits}f}" for value in values))


def _simulated() -> str:
    """Every variant of every setting."""
    head = (
        "setting", "variant", "planned layers", "before: 1 %, 50 %, 99 %, worst", "floor: 50 %",
        "after: 50 %, 99 %, worst", "busiest link: 50 %, 99 %", "plans that pay", "gain",
        "plan: 50 %, 99 %",
    )  # fmt: skip
    rows = []
    for name, found in read_document(SIMULATION)["settings"].items():
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


def main() -> None:
    """Write it."""
    PAGE.write_text(measurements(PAGE.read_text()))


if __name__ == "__main__":
    main()
