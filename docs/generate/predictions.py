"""Tables of what the cost model predicts, from the JSON of benchmarks/residents.py and others."""

from collections.abc import Iterable, Mapping
from typing import Any

from docs.generate.figures import read_document, read_rows
from docs.generate.reference import table

__all__ = [
    "GROUPS",
    "MODELS",
    "commit",
    "conditions",
    "expect",
    "gains",
    "kept",
    "large_models",
    "peers",
    "spread",
]

MODELS = {  # as JSON names them: type of experts, and MoE layers in all
    "Qwen3-235B-A22B": ("BF16", 94),
    "DeepSeek-V4-Flash": ("FP8", 43),
    "GLM-5.2": ("FP8", 75),
}
GROUPS = {  # ranks, hardware, whether all ranks gather all tokens
    (8, "h200", True): "8 H200, default dispatch",
    (8, "h200", False): "8 H200, DeepEP",
    (16, "h200", False): "16 H200, DeepEP",
    (64, "h200", False): "64 H200, DeepEP",
    (64, "gb200", False): "64 of a GB200 rack, DeepEP",
}
_SIZES = (256, 1024, 8192)  # tokens of each rank
_DEFAULT = "staying"  # memory of slots, of these models
_MEMORIES = (_DEFAULT, "afresh")
_TRAFFIC = {
    "the same": "steady",
    "jitter 0.5": "jitter",
    "two kinds, blocks of 8": "two kinds, in blocks of 8 batches",
    "a change": "a change, then steady",
}
_PEERS = ("eplb-deployed", "eplb", "lplb-deployed", "lplb")
_COMPARED = ((8, "h200", False), (64, "gb200", False))  # with Qwen3-235B-A22B
_Group = tuple[int, str, bool]
_HELD = {  # rows of recorded routing
    "off": "`off`",
    "staying": "this, slots per layer",
    "quota": "this, shared slots",
    "llep": "LLEP",
    "eplb-deployed": "EPLB, as deployed",
    "eplb": "EPLB, before every batch",
    "lplb-deployed": "LPLB, as deployed",
    "lplb": "LPLB, before every batch",
}


def commit(*documents: Mapping[str, Any]) -> str:
    """What measured or predicted them."""
    return ", ".join(dict.fromkeys(f"`{document['commit'][:8]}`" for document in documents))


def conditions(text: str, *documents: Mapping[str, Any]) -> str:
    """The line above a table: its conditions, and the commit where rows have none of their own."""
    return f"*{text}{f'; commit {commit(*documents)}' if documents else ''}.*\n\n"


def spread(found: Mapping[str, float], digits: int) -> str:
    """From the least to the most."""
    least, most = (f"{found[name]:.{digits}f}" for name in ("min", "max"))
    return least if least == most else f"{least} to {most}"


def _row(model: str, group: _Group, tokens: int, traffic: str = "the same") -> dict[str, Any]:
    [found] = [
        row
        for row in read_document("residents")["rows"]
        if (row["model"], *_group(row)) == (model, *group)
        and (row["tokens"], row["traffic"]) == (tokens, traffic)
    ]
    return dict(found)


def _group(row: Mapping[str, Any]) -> _Group:
    return row["ranks"], row["hardware"], row["gathered"]


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def expect() -> str:
    """By model and group: imbalance, times as fast by batch and memory, and what pays."""
    document = read_document("residents")
    pays = {(row["model"], *_group(row)): row for row in document["pays_from"]}
    rows = []
    for model, (weights, _) in MODELS.items():
        for group, called in GROUPS.items():
            found, pay = [_row(model, group, tokens) for tokens in _SIZES], pays[(model, *group)]
            gains = (
                _listed(_gain(row, name, pay["smallest"][name]) for row in found)
                for name in _MEMORIES
            )
            tokens = pay["tokens"]
            least = (f"{tokens[name]:,}" if tokens[name] else "never" for name in _MEMORIES)
            before = spread(found[-1]["before"], 2)
            rows.append((f"{model}, {weights}", called, before, *gains, " / ".join(least)))
    sizes = " / ".join(f"{tokens:,}" for tokens in _SIZES)
    layers = _listed(
        f"{_row(model, _COMPARED[0], 8192)['layers']} of {of}" for model, (_, of) in MODELS.items()
    )
    head = (
        "model", "GPUs", "busiest rank over mean, at 8,192", "`per_layer`", "`shared`",
        "pays from, `per_layer` / `shared`",
    )  # fmt: skip
    text = (
        "Predicted, MoE layers against `off`: steady traffic, batches with "
        f"{sizes} tokens of each rank, 2 slots, {layers} layers"
    )
    return conditions(text, document) + table(head, rows)


def _gain(row: Mapping[str, Any], name: str, smallest: int) -> str:
    """A dash where a server leaves such batches alone."""
    is_balanced = row["tokens"] * row["ranks"] >= smallest
    return f"{row['times_as_fast'][name]:.2f}" if is_balanced else "—"


def peers() -> str:
    """Other balancers beside this, all against ``off``."""
    document, rows = read_document("residents"), []
    for group in _COMPARED:
        for traffic, called in _TRAFFIC.items():
            fast = _row("Qwen3-235B-A22B", group, 8192, traffic)["times_as_fast"]
            names = ("ideal", *_MEMORIES, *_PEERS)
            rows.append((GROUPS[group], called, *(f"{fast[name]:.2f}" for name in names)))
    head = (
        "GPUs", "traffic", "`ideal`", "`per_layer`", "`shared`", "EPLB, as deployed",
        "EPLB, before every batch", "LPLB, as deployed", "LPLB, before every batch",
    )  # fmt: skip
    layers = _row("Qwen3-235B-A22B", _COMPARED[0], 8192)["layers"]
    text = (
        f"Predicted, times as fast as `off`: {layers} of 94 MoE layers of Qwen3-235B-A22B in BF16, "
        "batches with 8,192 tokens of each rank, 2 slots or redundant experts per rank and layer"
    )
    return conditions(text, document) + table(head, rows)


def _held() -> dict[str, dict[str, dict[str, Any]]]:
    """By policy, then by traffic."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in read_document("predicted")["policies"]:
        found.setdefault(row["policy"], {})[row["traffic"]] = row
    return found


def _fast(policy: str, traffic: str) -> str:
    held = _held()
    off, on = (held[name][traffic]["layer_seconds"] for name in ("off", policy))
    return f"{off / on:.2f}"


def kept() -> str:
    """Recorded routing: every policy against ``off``, and the imbalance that it leaves."""
    document, held = read_document("predicted"), _held()
    rows = [
        (
            called,
            *(
                f"{_fast(policy, traffic)} ({found['imbalance']:.3f})"
                for traffic, found in held[policy].items()
            ),
        )
        for policy, called in _HELD.items()
    ]
    text = (
        f"Predicted, times as fast as `off` (imbalance): all {document['layers']} MoE layers of "
        f"DeepSeek-V2-Lite in BF16, 8 H200, {document['tokens_per_rank']:,} tokens of each rank"
    )
    head = ("", "steady traffic", "two kinds in turn", "after a change")
    return conditions(text, document) + table(head, rows)


def large_models() -> str:
    """Plans for loads of large models: a row for each model and number of ranks."""
    document = read_document("big-models")
    head = (
        "model", "ranks", "before", "`quota`", "replicas", "busiest link, direct → with relays",
        "plan",
    )  # fmt: skip
    rows = [
        (
            row["model"],
            str(row["num_ranks"]),
            spread(row["before"], 2),
            spread(row["quota"], 3),
            spread(row["replicas"], 0),
            f"{row['link_without_relays']['max']:.0f} → {row['link']['max']:.0f} experts",
            f"{row['plan_microseconds']['median']:.0f} us",
        )
        for row in read_rows("big-models")
        if row["num_ranks"] in (8, 64)
    ]
    text = (
        "Planned, not served: busiest rank's load over the mean, from the best to the worst layer "
        f"and batch with {document['tokens_per_rank']:,} tokens of each rank, 2 slots, 8, 3 and 2 "
        f"layers; plans on a core of {document['machine']['cpu']}"
    )
    return conditions(text, document) + table(head, rows)


def gains() -> list[tuple[str, ...]]:
    """README.md's rows of large models: 8 GPUs first, and the memory that is the default there."""
    rows = []
    for model, group in (
        ("Qwen3-235B-A22B", (8, "h200", True)),
        ("GLM-5.2", (8, "h200", True)),
        ("Qwen3-235B-A22B", (64, "gb200", False)),
    ):
        found = [_row(model, group, tokens) for tokens in (1024, 8192)]
        weights, of = MODELS[model]
        fast = [row["times_as_fast"] for row in found]
        after = max(row["imbalance"][_DEFAULT] for row in found[1:])
        rows.append(
            (
                f"{model}, {weights}, {GROUPS[group]}, {found[0]['layers']} of {of} "
                "layers, predicted",
                f"{spread(found[1]['before'], 2)} → {after:.2f}",
                _listed(f"{each[_DEFAULT]:.2f}" for each in fast),
                _listed(f"{100 * each[_DEFAULT] / each['ideal']:.0f}" for each in fast) + " %",
                commit(read_document("residents")),
            )
        )
    return rows
