"""The tables of docs/gpus.md, from the JSON of benchmarks/device on a GPU.

python -m docs.generate.gpus
"""

from collections.abc import Callable, Mapping
from typing import Any

from docs.generate.figures import gpu_rows, read_document
from docs.generate.predictions import conditions
from docs.generate.reference import DOCS, table, with_table

__all__ = ["PAGE", "TABLES"]

PAGE = DOCS / "gpus.md"
_ENGINES = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23"}
_MODELS = {"layer of qwen3-235b-a22b": "Qwen3-235B-A22B", "layer of deepseek-v3": "DeepSeek-V3"}
_SHORT = {  # of ways to serve
    " tensor-parallel ranks": " TP",
    " data-parallel ranks": " DP",
    ", V2 runner": "",
    ", eager": "",
    "decode in CUDA graphs": "CUDA graphs",
}
_SIZES = ((8, 128), (16, 128), (32, 256), (64, 256), (64, 896))  # ranks, experts
_TOKENS, _SLOTS = 8192, 2
_SENDERS = "32 senders"  # the default


def _layers() -> str:
    """A row for each model and imbalance: milliseconds of the slowest rank."""
    head = (
        "model", "ranks", "imbalance", "off", "balanced", "ideal",
        "times as fast", "with an assumed NVLink",
    )  # fmt: skip
    rows = []
    for row in gpu_rows("layer-qwen3", "layer-deepseek"):
        took = row["layer_microseconds"]
        rows.append(
            (
                _MODELS[row["what"]],
                str(row["ranks"]),
                f"{row['imbalance_before']:.2f}",
                *(f"{took[name] / 1e3:.2f} ms" for name in ("off", "balanced", "ideal")),
                f"{row['speedup_with_own']:.2f}",
                f"{row['speedup_with_own_over_link']:.2f}",
            )
        )
    text = (
        "BF16, real shapes, made-up routing, 8,192 tokens of each rank, 2 slots, ranks in turn on "
        "one H200; times of the slowest"
    )
    return conditions(text, read_document("gpu-device")) + table(head, rows)


def _stages() -> str:
    """What every stage of ours takes, by ranks and experts; and whether it met its target."""
    sizes = tuple(f"{ranks} ranks, {experts} experts" for ranks, experts in _SIZES)
    rows = [
        ("count the ids of 8,192 tokens, and look them up", *_by_size("count + reroute")),
        ("exchange, when all others have posted", *_by_size("exchange")),
        ("plan", *_by_size("plan")),
    ]
    text = "Microseconds on one H200 that played all ranks, medians of CUDA graphs, 2 slots"
    made = conditions(text, read_document("gpu-device")) + table(("", *sizes), rows) + "\n"
    flow, alone = gpu_rows("balancer")
    others = [
        ("a balanced layer, 64 ranks", f"{flow['graph_microseconds']:.0f}", ""),
        ("a layer that is left alone, 64 ranks", *_of_target(alone, "graph", "at_most")),
        (
            "what the CPU of that machine does for a balanced layer",
            *_of_target(flow, "host", "host_at_most"),
        ),
        ("for one that is left alone", *_of_target(alone, "host", "host_at_most")),
    ]
    others += [
        (
            f"sending {sends['megabytes']:.0f} MB with {sends['what']}, within one GPU's memory",
            f"{sends['gigabytes_per_second']:.0f} GB/s",
            f"{sends['at_least_gb_per_second']:.0f} GB/s, which is 80 % of NVLink's",
        )
        for sends in gpu_rows("senders")  # measured once
        if sends["what"] == _SENDERS
    ]
    return made + table(("", "found", "target"), others)


def _by_size(what: str) -> list[str]:
    found: dict[tuple[int, int], list[float]] = {}
    for row in gpu_rows("routing", "exchange"):
        is_asked = row["what"] == what and row.get("tokens_per_rank", _TOKENS) == _TOKENS
        if is_asked and row.get("slots", _SLOTS) == _SLOTS:
            size = row["ranks"], row["experts"]
            found.setdefault(size, []).append(row["graph_microseconds"])
    return [_range(found[size]) if size in found else "not measured" for size in _SIZES]


def _range(found: list[float]) -> str:
    least, most = f"{min(found):.0f}", f"{max(found):.0f}"
    return least if least == most else f"{least} to {most}"


def _of_target(row: dict[str, Any], name: str, target: str) -> tuple[str, str]:
    return f"{row[f'{name}_microseconds']:.0f}", f"at most {row[target]:.0f}"


def _emulated() -> str:
    """Answers of engines on the emulated GPU: ways to serve with as many right answers in a row."""
    found = [row for row in read_document("gpu-emulated-values")["rows"] if "same_off" in row]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found:
        same = f"{row['same_balanced']}, {row['same_off']} of {row['answers']}"
        groups.setdefault((_ENGINES[row["what"].split(", ")[0]], same), []).append(row)
    rows = []
    for (engine, same), members in groups.items():
        layers = [layer for row in members for layer in row["imbalance_by_layer"].values()]
        before, after = (max(layer[number] for layer in layers) for number in (0, 1))
        ways = "; ".join(_short(row["what"].partition(", ")[2]) for row in members)
        rows.append((engine, ways, same, f"{before:.2f} to {after:.2f}"))
    samples = [row["samples"] for row in found]
    assert not any(each["failures"] for each in samples), "the line above the table says so"
    least, most = (of(each["layers"] for each in samples) for of in (min, max))
    text = (
        "A tiny made-up model, in bfloat16 with dispatches and experts in 4 bits, else in float32; "
        "10 to 14 prompts of 30 to 300 tokens; eager, in vLLM by its default runner (V2), unless "
        f"said otherwise; {least} to {most} samples in each, none failed"
    )
    head = (
        "", "ranks, and how", "greedy tokens as transformers', balanced, `off`",
        "worst layer's imbalance",
    )  # fmt: skip
    return conditions(text, *found) + table(head, rows)


def _short(way: str) -> str:
    for words, short in _SHORT.items():
        way = way.replace(words, short)
    return way


TABLES: Mapping[str, Callable[[], str]] = {
    "gpu-device layers": _layers,
    "gpu-device stages": _stages,
    "gpu-emulated": _emulated,
}


def main() -> None:
    """Write all of them."""
    page = PAGE.read_text()
    for name, made in TABLES.items():
        page = with_table(page, name, made())
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
