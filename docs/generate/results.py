"""What README.md and docs/results.md have from the JSON of benchmarks.

    python -m docs.generate.results     # brings both up to date

Every comparison is a ratio, "times as fast": above 1 balancing is faster.
"""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from docs.generate.figures import (
    TRAFFIC,
    estimate,
    gpu_rows,
    printed,
    read_document,
    read_rows,
    rounds,
    times,
)
from docs.generate.reference import table, table_in, with_table

__all__ = ["PAGE", "README", "readme", "results", "statements"]

_ROOT = Path(__file__).resolve().parents[2]
README = _ROOT / "README.md"
PAGE = _ROOT / "docs" / "results.md"
_SLOT_MEMORIES = "per_layer", "shared"
_ENGINES = {"serving": "vLLM", "sglang": "SGLang"}  # how the names of JSON files begin
_DEMO = re.compile(r"^  Load of the busiest rank.*? at most$", re.MULTILINE | re.DOTALL)
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_RANKS = 64  # of the big models' row in README.md
_BIG_MODELS = "Qwen3-235B-A22B", "GLM-5.2", "DeepSeek-V4-Flash"


def readme(text: str) -> str:
    """README.md with what the demo printed, and its table of gains.

    Raises ValueError where one of them has no place.
    """
    text, found = _DEMO.subn(lambda _: _demo(), text)
    if found != 1:
        raise ValueError(f"README.md has {_DEMO.pattern!r} {found} times")
    return _with_tables(text, {"gains": _gains})


def results(text: str) -> str:
    """docs/results.md with its tables. Raises ValueError where one has no place."""
    return _with_tables(text, _TABLES)


def statements() -> dict[Path, list[str]]:
    """What sentences of the pages say of figures, as those figures have it."""
    tokens = [row for prefix in _ENGINES for row in read_rows(f"{prefix}-tokens")]
    same, of = (sum(row[name] for row in tokens) for name in ("identical", "prompts"))
    steady, changing = map(_by_model, ("stationary", "in turn"))
    eplb = f"{_times_as_fast(changing, 'eplb', 'staying')} times as fast as EPLB"
    lplb = f"LPLB is {_times_as_fast(steady, 'staying', 'lplb')} times as fast"
    layer = read_document("big-models")["picture"]
    loads = layer["before"]
    after = [own + sum(copies) for own, copies in zip(layer["own"], layer["copies"], strict=True)]
    before, now = (f"{len(loads) * max(ranks) / sum(loads):.2f}" for ranks in (loads, after))
    balanced = [
        sum(row["verdict"] == "balanced" for row in read_rows(f"families-{engine}"))
        for engine in ("vllm", "sglang")
    ]
    answers = read_document("soak")["seen"]["answers"]
    batches = sum(row["batches"] for row in read_document("random_batches")["results"])
    copies = sum(map(len, layer["copies"]))
    slots, memory = _memory()
    return {
        README: [
            f"{same} of {of} prompts",
            f"{before} times the mean before balancing and {now} after",
            "{} and {} model families".format(*balanced),
            f"{slots} per rank for Qwen3-235B",
        ],
        PAGE: [
            f"all {answers:,} answers",
            f"{batches:,} random batches",
            *_sizes(),
            *_by_time(),
            *_routing(),
            f"perfect balance itself is only {_forced()} times as fast as no balancing",
            *memory,
        ],
        PAGE.with_name("choosing.md"): [eplb, lplb, f"{slots} per rank for Qwen3-235B"],
        PAGE.with_name("how-it-works.md"): [
            f"rank {loads.index(max(loads))} {before} times the mean",
            f"{_WORDS[copies]} copies",
        ],
        PAGE.with_name("settings.md"): [_samples_cost()],
        PAGE.with_name("gpus.md"): [f"in {len(read_document('gpu-checks')['checks'])} checks"],
        PAGE.parent / "dev" / "measurements.md": _routing(),
    }


def _sizes() -> list[str]:
    """Of what was measured or planned."""
    vllm, sglang = (read_document(f"load-{name}")["traffic"] for name in ("vllm", "sglang"))
    lengths = [traffic["prompt_tokens"]["median"] for traffic in (vllm, sglang)]
    return [
        "vLLM: prompts of {:,} tokens in the median; SGLang: of {:,}".format(*lengths),
        f"{read_document('big-models')['tokens_per_rank']:,} tokens of each rank",
        f"{read_document('predicted')['timed_tokens_per_rank']:,} tokens on each",
    ]


def _routing() -> list[str]:
    """The busier of two ranks, where a router is skewed and where routing was recorded."""
    [skewed] = {
        f"{read_document(f'{prefix}-ttft')['imbalance']['before']['mean']:.2f}"
        for prefix in _ENGINES
    }
    traffic = read_document("real-routing-ttft")["imbalance"].values()
    recorded = [each["before"] for each in traffic]
    return [f"{skewed} times the mean", f"{min(recorded):.2f} to {max(recorded):.2f}"]


def _forced() -> str:
    """How many times as fast forced balance is with recorded routing, from least to most."""
    found = []
    for engine in ("", "-sglang"):
        for row in read_rows(f"real-routing-ttft{engine}"):
            samples = row["ttft_samples"]
            found.append(estimate(list(zip(samples["off"], samples["ideal"], strict=True)))[0])
    return _range({"min": min(found), "max": max(found)}, 2)


def _samples_cost() -> str:
    document = read_document("verification")
    share = {name: 100 * part for name, part in document["verification_over_prefill"].items()}
    return (
        f"took {share['mean']:.1f} % of prefill time ({share['low']:.1f} to {share['high']:.1f} %, "
        f"{document['prompts']} prompts"
    )


def _memory() -> tuple[str, list[str]]:
    """Two slots of Qwen3-235B, and the rows of the table, by the sizes of the layers on the GPU."""
    rows = []
    for name, moe_layers, part in (
        ("Qwen3-235B", 94, "layer-qwen3"),
        ("DeepSeek-V3", 58, "layer-deepseek"),
    ):
        layer = gpu_rows(part)[0]
        slot = 3 * layer["hidden"] * layer["inner"] * 2 / 2**20  # three matrices in BF16, MiB
        kept = [f"{number * moe_layers * slot / 1024:.1f} GiB" for number in (1, 2)]
        cells = (f"{name} ({moe_layers} layers)", f"{slot:.0f} MiB", f"{2 * slot:.0f} MiB", *kept)
        rows.append(cells)
    return rows[0][2], [f"| {' | '.join(cells)} |" for cells in rows]


def _by_model(traffic: str) -> dict[str, dict[str, Any]]:
    """What was predicted of a layer in ``traffic``, by policy, planned for every batch."""
    rows = read_document("predicted")["policies"]
    return {row["policy"]: row for row in rows if row["traffic"] == traffic}


def _times_as_fast(rows: Mapping[str, Any], slow: str, fast: str) -> str:
    return f"{rows[slow]['layer_seconds'] / rows[fast]['layer_seconds']:.2f}"


def _with_tables(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    for name, made in tables.items():
        table_in(text, name)
        text = with_table(text, name, made())
    return text


def _demo() -> str:
    """What the demo printed of the imbalance, of the first prompt length and of answers."""
    from ultraep_lab.demo.report import demo_view

    lines = [line.strip("╭╮╰╯│─").rstrip() for line in printed(demo_view(read_document("demo")))]
    lines = [line for line in lines if line.strip()]
    first, answers = (_index(lines, words) for words in ("Load of", "same tokens"))
    return "\n".join([*lines[first : first + 7], *lines[answers:]])


def _index(lines: list[str], words: str) -> int:
    return next(index for index, line in enumerate(lines) if words in line)


def _gains() -> str:
    """README.md's table: one row for each place, also where balancing gains nothing."""
    layers = gpu_rows("layer-qwen3")
    rows = [
        (
            "a layer of Qwen3-235B, made-up skews, 16 ranks in turn on one H200",
            _slashed(f"{row['imbalance_before']:.2f}" for row in layers)
            + f" → {max(row['imbalance_after'] for row in layers):.3f}",
            _slashed(f"{row['speedup_with_own']:.2f}" for row in layers),
            _slashed(f"{100 * row['of_ideal_with_own']:.0f}" for row in layers) + " %",
        ),
        (
            f"loads of {_slashed(_BIG_MODELS)} as served by others, {_RANKS} ranks",
            _slashed(_range(row["before"], 2) for row in _big(_RANKS))
            + f" → {max(row['quota']['max'] for row in _big(_RANKS)):.3f}",
            "planned, not timed",
            "",
        ),
        _prefill(),
        _default_batches(),
        _predicted(),
        _recorded(),
        _balanced(),
    ]
    return table(("where", "busiest rank over mean", "times as fast", "of ideal"), rows)


def _prefill() -> tuple[str, ...]:
    documents = [read_document(f"{prefix}-ttft") for prefix in _ENGINES]
    rows = [document["rows"][0] for document in documents]
    found = [document["imbalance"] for document in documents]
    [tokens] = {row["prompt_tokens"] for row in rows}
    return (
        f"{_slashed(_ENGINES.values())}, prompts of {tokens >> 10}k, two CPU ranks, a router made "
        "to be skewed",
        _slashed(f"{each['before']['mean']:.2f}" for each in found)
        + f" → {max(each['after']['mean'] for each in found):.3f}",
        _slashed(times(*estimate(rounds(row, "off"))) for row in rows),
        _slashed(_of_ideal(row).removesuffix(" %") for row in rows) + " %",
    )


def _default_batches() -> tuple[str, ...]:
    """A layer where copies stay, in batches of the size that engines schedule by default."""
    ranks, tokens = 8, 1024
    [row] = [
        row
        for row in read_document("residents")["rows"]
        if (row["ranks"], row["tokens"], row["traffic"]) == (ranks, tokens, "the same")
        and row["layer"].startswith("Qwen3-235B")
    ]
    fast, found = row["times_as_fast"], row["imbalance"]
    return (
        f"a layer of Qwen3-235B as served by others, {ranks} H200s, {ranks * tokens:,} tokens a "
        "batch, predicted",
        f"{found['off']:.2f} → {found['staying']:.3f}",
        f"{fast['staying']:.2f}",
        f"{100 * fast['staying'] / fast['ideal']:.0f} %",
    )


def _predicted() -> tuple[str, ...]:
    found = _by_model("stationary")
    return (
        "recorded routing of DeepSeek-V2-Lite, 8 H200s, predicted, slots shared / per layer",
        f"{found['off']['imbalance']:.2f} → {found['quota']['imbalance']:.3f}",
        " / ".join(_times_as_fast(found, "off", policy) for policy in ("quota", "staying")),
        "",
    )


def _recorded() -> tuple[str, ...]:
    document = read_document("real-routing-ttft")
    row, found = document["rows"][0], document["imbalance"]["law"]
    return (
        "**nothing to gain:** vLLM, the same routing, two CPU ranks",
        f"{found['before']:.2f} → {found['quota']:.3f}",
        times(*estimate(rounds(row, "off"))),
        _of_ideal(row),
    )


def _balanced() -> tuple[str, ...]:
    document = read_document("serving-balanced")
    row, found = document["rows"][-1], document["imbalance"]
    before, after = (f"{found[when]['mean']:.3f}" for when in ("before", "after"))
    [layer], (_, alone) = gpu_rows("layer-deepseek"), gpu_rows("balancer")
    even = layer["layer_microseconds"]["ideal"]
    kept = even / (even + alone["graph_microseconds"])
    return (
        "**it loses:** vLLM, two CPU ranks, an even router / an even layer of DeepSeek-V3 (H200)",
        f"{before} → {after} / left alone",
        f"{times(*estimate(rounds(row, 'off')))} / {kept:.3f}",
        "",
    )


def _of_ideal(row: Mapping[str, Any]) -> str:
    return f"{100 * estimate(rounds(row, 'ideal'))[0]:.0f} %"


def _ttft() -> str:
    """Time to first token: every engine, traffic and prompt length."""
    rows = []
    for prefix, engine in _ENGINES.items():
        recorded = "real-routing-ttft" + ("-sglang" if prefix == "sglang" else "")
        for name, traffic in (
            (f"{prefix}-ttft", "skewed"),
            (recorded, "recorded"),
            (f"{prefix}-balanced", "balanced"),
        ):
            for row in read_rows(name):
                of = f" ({TRAFFIC[row['workload']]})" if "workload" in row else ""
                ideal = _of_ideal(row) if "ideal" in row["ttft_samples"] else ""
                length = f"{row['prompt_tokens'] / 1024:.2g}k"
                ratio = times(*estimate(rounds(row, "off")))
                rows.append((engine, traffic + of, length, ratio, ideal))
    return table(("engine", "routing", "prompt", "times as fast", "of ideal"), rows)


def _load() -> str:
    """Under load, at the middle of the rates that were measured."""
    vllm, sglang = read_document("load-vllm"), read_document("load-sglang")
    ttft = "mean time to first token", "ttft_mean_seconds"
    token = "mean time between tokens of a request, P99 over them", "itl_p99_seconds"
    rows = [
        ("vLLM", "4 requests/s", *_at_rate(vllm, 4.0, ttft, "off")),
        ("vLLM", "4 requests/s", *_at_rate(vllm, 4.0, token, "off")),
        ("vLLM", "0.5 s of " + ttft[0], "requests/s", "off", _more_requests(vllm, 0.5)),
        ("SGLang", "3 requests/s", *_at_rate(sglang, 3.0, ttft, "off")),
        ("SGLang", "3 requests/s", *_at_rate(sglang, 3.0, ttft, "sglang-eplb", "its EPLB")),
        ("SGLang", "3 requests/s", *_at_rate(sglang, 3.0, token, "off")),
    ]
    return table(("engine", "at", "what", "against", "times as good"), rows)


def _windows(document: Mapping[str, Any], contender: str) -> list[list[dict[str, Any]]]:
    """Of one contender, by repeat, in the order of rates."""
    windows = [w for w in document["windows"] if w["contender"] == contender]
    repeats = sorted({window["repeat"] for window in windows})
    in_order = sorted(windows, key=lambda window: float(window["rate"]))
    return [[w for w in in_order if w["repeat"] == repeat] for repeat in repeats]


def _at_rate(
    document: Mapping[str, Any], rate: float, figure: tuple[str, str], base: str, called: str = ""
) -> tuple[str, str, str]:
    """What a figure is, ``base``, and how many times as fast ``quota`` is as that at one rate."""
    said, key = figure
    others, ours = (
        [w[key] for windows in _windows(document, name) for w in windows if w["rate"] == rate]
        for name in (base, "quota")
    )
    return said, called or base, times(*estimate(list(zip(others, ours, strict=True))))


def _more_requests(document: Mapping[str, Any], limit: float) -> str:
    """How many times the requests/s of ``off`` ``quota`` serves within ``limit`` seconds."""
    ours, others = (
        [_crossing(windows, limit) for windows in _windows(document, name)]
        for name in ("quota", "off")
    )
    return times(*estimate(list(zip(ours, others, strict=True))))


def _crossing(windows: list[dict[str, Any]], limit: float) -> float:
    """The rate at which the mean time to first token passes ``limit``, on a straight line.

    Raises ValueError where that is outside the rates that were measured.
    """
    for one, other in pairwise(windows):
        low, high = one["ttft_mean_seconds"], other["ttft_mean_seconds"]
        if low <= limit < high:
            part = (limit - low) / (high - low)
            return float(one["rate"] + part * (other["rate"] - one["rate"]))
    raise ValueError(f"{limit} s are beyond the measured rates")


def _big_table() -> str:
    """A row for each model and number of ranks."""
    head = (
        "model", "ranks", "before", "`quota`", "`eplb`", "`lplb`", "replicas",
        "busiest link, direct → with relays", "plan",
    )  # fmt: skip
    rows = [
        (
            row["model"],
            str(row["num_ranks"]),
            _range(row["before"], 2),
            *(_range(row[policy], 3) for policy in ("quota", "eplb", "lplb")),
            _range(row["replicas"], 0),
            f"{row['link_without_relays']['max']:.0f} → {row['link']['max']:.0f} experts",
            f"{row['plan_microseconds']['median']:.0f} us",
        )
        for row in read_rows("big-models")
    ]
    return table(head, rows)


def _by_time() -> list[str]:
    """How many times as fast plans by time are where ranks are not equally fast."""
    found = [row["by_count_over_by_time"] for row in read_document("speeds")["busy"]]
    return [times(ratio["median"], *ratio["interval"]) for ratio in found]


def _kept() -> str:
    """Imbalance and predicted time where a plan is made for every batch."""
    cells: dict[str, list[str]] = {}
    for row in read_document("predicted")["policies"]:
        shown = f"{row['imbalance']:.3f}, {1e3 * row['layer_seconds']:.2f} ms"
        cells.setdefault(row["policy"], []).append(shown)
    rows = ((f"`{policy}`", *shown) for policy, shown in cells.items())
    return table(("policy", "steady traffic", "two kinds in turn"), rows)


def _memories() -> str:
    """Time to first token with either memory of slots, by engine and prompt length."""
    rows = []
    for prefix, engine in _ENGINES.items():
        documents = (read_rows(f"{prefix}-ttft-{name}") for name in _SLOT_MEMORIES)
        for both in zip(*documents, strict=True):
            [tokens] = {row["requested_tokens"] for row in both}
            ratios = (times(*estimate(rounds(row, "off"))) for row in both)
            ideal = _slashed(_of_ideal(row).removesuffix(" %") for row in both)
            rows.append((engine, f"{tokens:,}", *ratios, f"{ideal} %"))
    heads = ("engine", "prompt", *(f"`{name}`" for name in _SLOT_MEMORIES), "of ideal")
    return table(heads, rows)


def _staying() -> str:
    """Predicted times as fast where copies stay, by layer, ranks and tokens, then by traffic."""
    cells: dict[str, dict[str, list[str]]] = {}
    names = ("ideal", "staying", "afresh", "lplb", "eplb")
    for row in read_document("residents")["rows"]:
        if row["ranks"] != 16 and row["traffic"] in _SHOWN:
            model = "-".join(row["layer"].split("-")[:2])
            where = f"{model}, {row['ranks']} ranks, {row['tokens']:,} tokens of each"
            found = cells.setdefault(where, {})
            for name in names:
                found.setdefault(name, []).append(f"{row['times_as_fast'][name]:.2f}")
            copies = f"{row['copies']['staying']:.1f} of {row['copies']['afresh']:.0f}"
            found.setdefault("copies", []).append(copies)
    rows = ((where, *map(" / ".join, found.values())) for where, found in cells.items())
    return table(("layer", *(f"`{name}`" for name in names), "copies of a batch"), rows)


def _tokens() -> str:
    """Prompts whose greedy tokens are the same with balancing on and off."""
    rows = []
    for prefix, engine in _ENGINES.items():
        for dtype in ("float32", "bfloat16"):
            found = [row for row in read_rows(f"{prefix}-tokens") if row["dtype"] == dtype]
            same, of = (sum(row[name] for row in found) for name in ("identical", "prompts"))
            rows.append((f"{engine}, {dtype}", f"{same} of {of}"))
    return table(("", "prompts with the same tokens"), rows)


def _stages() -> str:
    """UltraEP's published times beside ours, 64 ranks and 256 experts."""
    found: dict[str, list[float]] = {"plan": [], "count + reroute": []}
    for row in gpu_rows("routing"):
        size = row["ranks"], row["experts"], row.get("tokens_per_rank", 8192), row.get("slots", 2)
        if size == (64, 256, 8192, 2) and row["what"] in found:
            found[row["what"]].append(row["graph_microseconds"])
    ranges = {name: {"min": min(took), "max": max(took)} for name, took in found.items()}
    ours = {name: f"{_range(took, 0)} us" for name, took in ranges.items()}
    rows = [
        ("plan", "67 to 78 us", ours["plan"]),
        ("reroute", "36 to 39 us", f"{ours['count + reroute']}, with the count"),
    ]
    return table(("64 ranks, 256 experts", "UltraEP, as published", "here, on one H200"), rows)


def _big(num_ranks: int) -> list[dict[str, Any]]:
    rows = [row for row in read_rows("big-models") if row["num_ranks"] == num_ranks]
    return sorted(rows, key=lambda row: _BIG_MODELS.index(row["model"]))


def _slashed(parts: Any) -> str:
    return " / ".join(parts)


def _range(found: Mapping[str, float], digits: int) -> str:
    least, most = (f"{found[name]:.{digits}f}" for name in ("min", "max"))
    return least if least == most else f"{least} to {most}"


_SHOWN = ("the same", "jitter 0.5", "two kinds, blocks of 8")

_TABLES: Mapping[str, Callable[[], str]] = {
    "ttft": _ttft,
    "load": _load,
    "big-models": _big_table,
    "kept": _kept,
    "staying": _staying,
    "memories": _memories,
    "tokens": _tokens,
    "stages": _stages,
}


def main() -> None:
    """Write both."""
    for path, updated in ((README, readme), (PAGE, results)):
        path.write_text(updated(path.read_text()))


if __name__ == "__main__":
    main()
