"""What README.md and docs/results.md have from the JSON of benchmarks.

    python -m docs.generate.results     # brings them and docs/choosing.md up to date

Every comparison is a ratio, "times as fast": above 1 balancing is faster.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from docs.generate import predictions
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
from docs.generate.predictions import commit, conditions
from docs.generate.reference import table, table_in, with_table

__all__ = ["PAGES", "statements", "updated"]

_ROOT = Path(__file__).resolve().parents[2]
_README = _ROOT / "README.md"
_DOCS = _ROOT / "docs"
_SLOT_MEMORIES = "per_layer", "shared"
_LOADED = {"vllm": "vLLM", "sglang": "SGLang"}  # by parts of under-load.json
_ENGINES = {"serving": "vLLM", "sglang": "SGLang"}  # how the names of JSON files begin
_RECORDED = {"serving": "real-routing-ttft", "sglang": "real-routing-ttft-sglang"}
_DEMO = re.compile(r"^  Load of the busiest rank.*? at most$", re.MULTILINE | re.DOTALL)
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ULTRAEP = "94cab09"  # the commit of its README that has these, at three imbalances
_PUBLISHED = {
    "busiest rank over mean": "1.51 / 2.01 / 3.03 → 1.01",
    "plan": "67 / 72 / 78 us",
    "reroute": "39 / 37 / 36 us",
    "copies, direct": "214 / 265 / 317 us",
    "copies, with relays": "194 / 195 / 188 us",
    "busiest link": "706 / 712 / 715 GB/s",
    "gradients, beside other work": "1.9 / 2.2 / 2.4 ms",
    "replicas, of an expert / in all": "4, 5, 6 / 38, 46, 51",
}


def updated(path: Path) -> str:
    """A page of ``PAGES`` with its tables, and README.md with what the demo printed.

    Raises ValueError where one of them has no place.
    """
    text = path.read_text()
    if path == _README:
        text, found = _DEMO.subn(lambda _: _demo(), text)
        if found != 1:
            raise ValueError(f"README.md has {_DEMO.pattern!r} {found} times")
    for name, made in PAGES[path].items():
        table_in(text, name)
        text = with_table(text, name, made())
    return text


def statements() -> dict[Path, list[str]]:
    """What sentences of the pages say of figures, as those figures have it."""
    tokens = [row for prefix in _ENGINES for row in read_rows(f"{prefix}-tokens")]
    same, of = (sum(row[name] for row in tokens) for name in ("identical", "prompts"))
    layer = read_document("big-models")["picture"]
    loads, copies = layer["before"], layer["copies"]
    after = list(loads)
    for copy in copies:
        after[copy["from"]] -= copy["assignments"]
        after[copy["to"]] += copy["assignments"]
    before, now = (f"{len(loads) * max(ranks) / sum(loads):.2f}" for ranks in (loads, after))
    sampled = "layer {layer}, the most uneven of {sampled} sampled of {layers}".format(**layer)
    balanced = [
        sum(row["verdict"] == "balanced" for row in read_rows(f"families-{engine}"))
        for engine in ("vllm", "sglang")
    ]
    answers = read_document("soak")["seen"]["answers"]
    batches = sum(row["batches"] for row in read_document("random_batches")["results"])
    slots, shared, memory = _memory()
    checks, device = (read_document(f"gpu-{name}") for name in ("checks", "device"))
    return {
        _README: [
            f"{same} of {of} prompts",
            f"{before} times the mean before balancing and {now} after",
            sampled,
            "{} and {} model families".format(*balanced),
            f"{slots} per rank for Qwen3-235B",
            f"{shared} per rank;",
            _on_cpu(),
            f"MoE layers gain {predictions.gains()[0][2].split(', ')[1]}, predicted",
        ],
        _DOCS / "results.md": [
            f"all {answers:,} answers",
            f"{batches:,} random batches",
            *_traffic(),
            *_by_time(),
            f"{_forced()} times as fast as no balancing",
            *memory,
        ],
        _DOCS / "choosing.md": [f"{size} per rank for Qwen3-235B" for size in (slots, shared)],
        _DOCS / "how-it-works.md": [
            f"rank {loads.index(max(loads))} {before} times the mean",
            f"{_WORDS[len(copies)]} copies",
            sampled,
        ],
        _DOCS / "settings.md": [_samples_cost()],
        _DOCS / "gpus.md": [
            f"in {len(checks['checks'])} checks (commit {checks['commit']})",
            f"commit {device['commit']}",
            *_beside_the_tables(),
        ],
        _DOCS / "dev" / "measurements.md": _routing(),
    }


def _traffic() -> list[str]:
    """What load generators send to both engines, and what vLLM answers of it."""
    found = read_document("under-load")["vllm"]
    agents, alone = found["traffic"]["agents"], found["traffic"]["open"]
    [rate] = {row["rate"] for row in found["rows"]} - {None}
    served = (
        statistics.median(
            row["request_throughput"]
            for row in found["rows"]
            if (row["rate"], row["policy"]) == (rate, policy)
        )
        for policy in ("off", "quota")
    )
    return [
        f"{agents['clients']} clients whose requests share a prefix of {agents['shared_tokens']:,} "
        f"tokens and have {agents['own_tokens']} of their own; others have "
        f"{alone['median_tokens']:,} in the median",
        "Of {} requests/s vLLM answered {:.1f} without balancing, and {:.1f} with it".format(
            rate, *served
        ),
    ]


def _on_cpu() -> str:
    """What a layer took of the H200's CPU, left alone and balanced."""
    flow, alone = (f"{row['host_microseconds']:.0f}" for row in gpu_rows("balancer"))
    return f"{alone} to {flow} us of the CPU for a layer"


def _beside_the_tables() -> list[str]:
    """Of the H200, what the tables of docs/gpus.md leave out."""
    [rack] = (row for row in gpu_rows("routing") if (row["ranks"], row["what"]) == (72, "plan"))
    plans = [row["own_microseconds"]["plan"] for row in gpu_rows("layer-qwen3", "layer-deepseek")]
    least, most, largest = min(plans[:-1]), max(plans[:-1]), plans[-1]
    drifting = [
        row["layer_microseconds"]
        for row in read_document("gpu-checks")["layers, one kind timed after the other"]
        if "qwen3" in row["what"]
    ]
    return [
        _listed(f"{took['off'] / took['balanced']:.2f}" for took in drifting) + " there",
        f"72 ranks needs {rack['graph_microseconds']:.0f} us for a plan",
        f"took {least:.0f} to {most:.0f} us with 16 ranks, and {largest:.0f} us with 64",
    ]


def _routing() -> list[str]:
    """The busier of two ranks, where routing was recorded."""
    traffic = read_document(_RECORDED["serving"])["imbalance"].values()
    recorded = [each["before"] for each in traffic]
    return [f"{min(recorded):.2f} to {max(recorded):.2f}"]


def _forced() -> str:
    """How many times as fast forced balance is with recorded routing, from least to most."""
    found = []
    for name in _RECORDED.values():
        for row in read_rows(name):
            samples = row["ttft_samples"]
            found.append(estimate(list(zip(samples["off"], samples["ideal"], strict=True)))[0])
    return predictions.spread({"min": min(found), "max": max(found)}, 2)


def _samples_cost() -> str:
    document = read_document("verification")
    share = {name: 100 * part for name, part in document["verification_over_prefill"].items()}
    return (
        f"took {share['mean']:.1f} % of prefill time ({share['low']:.1f} to {share['high']:.1f} %, "
        f"{document['prompts']} prompts"
    )


def _memory() -> tuple[str, str, list[str]]:
    """Two slots of Qwen3-235B, per layer and shared, and the table's rows; of layers on the GPU."""
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
    return rows[0][4], rows[0][2], [f"| {' | '.join(cells)} |" for cells in rows]


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
        *predictions.gains(),
        (
            "a layer of Qwen3-235B's sizes, made-up skews, 8,192 tokens of each of 16 ranks in "
            "turn on one H200, NVLink assumed, an earlier build",
            _listed(f"{row['imbalance_before']:.2f}" for row in layers)
            + f" → {max(row['imbalance_after'] for row in layers):.2f}",
            _listed(f"{row['speedup_with_own_over_link']:.2f}" for row in layers),
            _listed(f"{100 * row['of_ideal_with_own_over_link']:.0f}" for row in layers) + " %",
            commit(read_document("gpu-device")),
        ),
        _served("prompts of 2,048, a router made to be skewed", "{}-ttft-per_layer", 2048),
        _recorded(),
        _served("**nothing to gain:** prompts of 2,048, an even router", "{}-balanced", 2048),
    ]
    text = (
        "GPUs: MoE layers, 1,024 / 8,192 tokens of each rank in a batch, default slots; on the "
        "H200 experts and our stages alone. Prompts: time to first token, tiny models in float32, "
        "two CPU ranks, 95 % intervals"
    )
    head = (
        "where",
        "busiest rank over mean",
        "times as fast",
        "of [forced ideal](docs/results.md)",
        "commit",
    )
    return conditions(text) + table(head, rows)


def _served(what: str, name: str, tokens: int) -> tuple[str, ...]:
    """Both engines with prompts of one length."""
    documents = [read_document(name.format(prefix)) for prefix in _ENGINES]
    rows = [
        next(row for row in document["rows"] if row["requested_tokens"] == tokens)
        for document in documents
    ]
    found = [document["imbalance"] for document in documents]
    has_ideal = "ideal" in rows[0]["ttft_samples"]
    return (
        f"{what}: {_listed(_ENGINES.values())}",
        _listed(f"{each['before']['mean']:.2f}" for each in found)
        + f" → {max(each['after']['mean'] for each in found):.2f}",
        "; ".join(times(*estimate(rounds(row, "off"))) for row in rows),
        "; ".join(map(_of_ideal, rows)) if has_ideal else "",
        commit(*documents),
    )


def _recorded() -> tuple[str, ...]:
    documents = [read_document(name) for name in _RECORDED.values()]
    rows, found = ([document[name] for document in documents] for name in ("rows", "imbalance"))
    before = [each["law"]["before"] for each in found]
    return (
        "**little to gain:** prompts of 4,096, DeepSeek-V2-Lite's recorded routing: "
        + _listed(_ENGINES.values()),
        f"{max(before):.2f} → {max(each['law']['quota'] for each in found):.2f}",
        "; ".join(times(*estimate(rounds(row[0], "off"))) for row in rows),
        "; ".join(_of_ideal(row[0]) for row in rows),
        commit(*documents),
    )


def _of_ideal(row: Mapping[str, Any]) -> str:
    middle, low, high = (100 * part for part in estimate(rounds(row, "ideal")))
    return f"{middle:.0f} % ({low:.0f}-{high:.0f})"


def _ttft() -> str:
    """Time to first token of a skewed router with either memory of slots."""
    rows, read = [], []
    for prefix, engine in _ENGINES.items():
        documents = [read_document(f"{prefix}-ttft-{name}") for name in _SLOT_MEMORIES]
        read += documents
        for both in zip(*(document["rows"] for document in documents), strict=True):
            [tokens] = {row["requested_tokens"] for row in both}
            ratios = (times(*estimate(rounds(row, "off"))) for row in both)
            rows.append((engine, f"{tokens:,}", *ratios, *map(_of_ideal, both)))
    of_ideal = (f"of ideal, `{name}`" for name in _SLOT_MEMORIES)
    heads = ("engine", "prompt", *(f"`{name}`" for name in _SLOT_MEMORIES), *of_ideal)
    before = _listed(f"{document['imbalance']['before']['mean']:.2f}" for document in read[::2])
    text = (
        f"A made-up model of 4 MoE layers in float32, two tensor-parallel CPU ranks "
        f"({read[0]['machine']['cpu']}), one prompt a batch, {read[0]['rows'][0]['rounds']} "
        f"rounds; busiest rank over mean {before} (vLLM, SGLang)"
    )
    return conditions(text, *read) + table(heads, rows)


def _little() -> str:
    """Time to first token where there is little to gain, or nothing."""
    rows, dtypes = [], set()
    for prefix, engine in _ENGINES.items():
        for name in (_RECORDED[prefix], f"{prefix}-balanced"):
            document = read_document(name)
            dtypes.add(document["dtype"])
            for row in document["rows"]:
                traffic = f"recorded, {TRAFFIC[row['workload']]}" if "workload" in row else "even"
                ideal = _of_ideal(row) if "ideal" in row["ttft_samples"] else ""
                ratio = times(*estimate(rounds(row, "off")))
                tokens = f"{row['requested_tokens']:,}"
                rows.append((engine, traffic, tokens, ratio, ideal, commit(document)))
    [dtype], recorded = dtypes, read_document(_RECORDED["serving"])
    text = (
        f"Two tensor-parallel CPU ranks ({recorded['machine']['cpu']}), {dtype}, one prompt a "
        "batch, slots of each layer's own; 4 MoE layers, where routing is recorded "
        f"{len(recorded['layers'])}"
    )
    heads = ("engine", "routing", "prompt", "times as fast", "of ideal", "commit")
    return conditions(text) + table(heads, rows)


def _load() -> str:
    """Of the engines' own load generators, what balancing makes better."""
    document, cells = read_document("under-load"), []
    for engine, called in _LOADED.items():
        rows = document[engine]["rows"]
        for rate in dict.fromkeys(row["rate"] for row in rows):
            off, quota = (
                [row for row in rows if (row["rate"], row["policy"]) == (rate, policy)]
                for policy in ("off", "quota")
            )
            traffic = "agents" if rate is None else f"{rate} requests/s"
            waits = (_better(off, quota, key) for key in ("mean_ttft_ms", "mean_tpot_ms"))
            cells.append((called, traffic, _better(quota, off, "request_throughput"), *waits))
    head = "engine", "traffic", "requests/s", "time to first token", "time per later token"
    requests = document["sglang"]["traffic"]["requests"]
    text = (
        "Times as fast as `off` (requests/s: times as many); the demo's model in float32, two CPU "
        f"ranks ({document['machine']['cpu']}), slots per layer, {requests} requests a run"
    )
    return conditions(text, document) + table(head, cells)


def _better(more: list[dict[str, Any]], less: list[dict[str, Any]], key: str) -> str:
    pairs = [(one[key], other[key]) for one, other in zip(more, less, strict=True)]
    return times(*estimate(pairs))


def _by_time() -> list[str]:
    """How many times as fast plans by time are where ranks are not equally fast."""
    found = [row["by_count_over_by_time"] for row in read_document("speeds")["busy"]]
    return [times(ratio["median"], *ratio["interval"]) for ratio in found]


def _tokens() -> str:
    """Prompts whose greedy tokens are the same with balancing on and off."""
    rows, read = [], [read_document(f"{prefix}-tokens") for prefix in _ENGINES]
    for document, engine in zip(read, _ENGINES.values(), strict=True):
        for dtype in ("float32", "bfloat16"):
            found = [row for row in document["rows"] if row["dtype"] == dtype]
            same, of = (sum(row[name] for row in found) for name in ("identical", "prompts"))
            rows.append((f"{engine}, {dtype}", f"{same} of {of}"))
    text = "Greedy tokens of the demo's made-up model, on against off, two CPU ranks"
    return conditions(text, *read) + table(("", "prompts with the same tokens"), rows)


def _stages() -> str:
    """All that UltraEP publishes of its kernels beside ours."""
    found: dict[str, list[str]] = {"plan": [], "count + reroute": []}
    for row in gpu_rows("routing"):
        size = row["ranks"], row["experts"], row.get("tokens_per_rank"), row.get("slots")
        if size == (64, 256, 8192, 2) and row["what"] in found:
            found[row["what"]].append(f"{row['graph_microseconds']:.0f}")
    plan, reroute = (f"{_listed(found[name])} us" for name in found)
    [layer] = gpu_rows("layer-deepseek")
    inside = layer["own_microseconds"]["replicate"]
    ours = (
        f"1.51 / {layer['imbalance_before']:.2f} / 3.03 → {layer['imbalance_after']:.3f}",
        plan,
        f"{reroute}, with the count",
        f"at 2.01: {inside:.0f} us in one GPU's memory, "
        f"{layer['replicate_over_link_microseconds']:.0f} us over an assumed NVLink of an H200",
        "not measured",
        "no NVLink here",
        "no training",
        f"at 2.01: {layer['replicas']} in all",
    )
    published = zip(_PUBLISHED.items(), ours, strict=True)
    rows = ((what, theirs, own) for (what, theirs), own in published)
    text = (
        "64 ranks, 256 experts, 8,192 tokens of each, top 8, BF16, 2 slots; UltraEP at commit "
        f"`{_ULTRAEP}` with experts of 36 MiB on 64 GPUs, ours with 84 MiB on one H200 that played "
        "all ranks"
    )
    head = ("", "UltraEP, as published", "here")
    return conditions(text, read_document("gpu-device")) + table(head, rows)


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)


_Tables = Mapping[str, Callable[[], str]]
PAGES: Mapping[Path, _Tables] = {
    _README: {"gains": _gains},
    _DOCS / "choosing.md": {"expect": predictions.expect},
    _DOCS / "results.md": {
        "ttft": _ttft,
        "little": _little,
        "load": _load,
        "peers": predictions.peers,
        "kept": predictions.kept,
        "big-models": predictions.large_models,
        "stages": _stages,
        "tokens": _tokens,
    },
}


def main() -> None:
    """Write all of them."""
    for path in PAGES:
        path.write_text(updated(path))


if __name__ == "__main__":
    main()
