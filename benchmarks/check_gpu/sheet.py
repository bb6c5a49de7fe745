"""What reviewers of vLLM and SGLang ask of a balancer, on one sheet, from what ``check_gpu`` found.

Prefill of 8,192 tokens; layers at imbalances of 1, 2, 4 and 7, with MaxVio (max/mean - 1) and what
each rank computes; answers with balancing on and off; memory. What is not there is named, with why.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_ANSWERS = "engine", "server-vllm", "server-sglang", "formats"
_LAYERS = "layer-sheet"
_MODEL_LAYERS = 94  # of the model whose layer it is
Row = Mapping[str, Any]


def sheet(document: Mapping[str, Any]) -> str:
    """Markdown."""
    gpu, versions = document["gpu"], document["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("vllm", "sglang") if versions[name])
    blocks = [
        "# Balancing on one sheet",
        f"{'no GPU' if gpu is None else gpu['name']}; {names or 'no engine'}; commit "
        f"`{document['commit'][:8]}`. A missing line names the part of `check_gpu` that brings it.",
        "## Time to first token, prompts of 8,192 tokens, one output token",
        _first_token(document["parts"]),
        "## A layer of Qwen3-235B on 8 ranks in turn, 8,192 tokens of each, one hot rank",
        _layers(document["parts"]),
        "## Answers, on against off",
        _answers(document["parts"]),
    ]
    return "\n\n".join(blocks) + "\n"


def _missing(parts: Mapping[str, Any], part: str) -> str:
    entry = parts.get(part, {})
    reason = entry.get("reason") or entry.get("result") or "not asked for"
    return f"Missing: part `{part}` ({reason})."


def _rows(parts: Mapping[str, Any], part: str) -> Iterator[Row]:
    found = parts.get(part, {}).get("found")
    return (row for row in found or () if row["passed"])


def _first_token(parts: Mapping[str, Any]) -> str:
    rows = [row for row in _rows(parts, "first-token") if row.get("ttft_seconds")]
    if not rows:
        return _missing(parts, "first-token")
    lines = [
        "| tokens | busiest rank over mean | off | balanced | ideal |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = (row["imbalance"][when]["mean"] for when in ("before", "after"))
        took = (f"{row['ttft_seconds'][name]:.3f} s" for name in ("off", "quota", "ideal"))
        lines.append(
            f"| {row['prompt_tokens']} | {before:.2f} → {after:.2f} | {' | '.join(took)} |"
        )
    return "\n".join(lines)


def _layers(parts: Mapping[str, Any]) -> str:
    device = parts.get("device", {}).get("found") or {"parts": []}
    rows = [row for part in device["parts"] if part["part"] == _LAYERS for row in part["rows"]]
    rows = [row for row in rows if row["passed"] and "layer_microseconds" in row]
    if not rows:
        return _missing(parts, "device")
    lines = [
        "| MaxVio | off | balanced | ideal | times as fast, with our stages | loads of ranks |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = (row[f"imbalance_{when}"] - 1 for when in ("before", "after"))
        took = row["layer_microseconds"]
        times = (f"{took[name] / 1e3:.2f} ms" for name in ("off", "balanced", "ideal"))
        loads = " → ".join(
            f"{min(row['rank_loads'][name])} to {max(row['rank_loads'][name])}"
            for name in ("off", "balanced")
        )
        lines.append(
            f"| {before:.2f} → {after:.3f} | {' | '.join(times)} | {row['speedup_with_own']:.2f} "
            f"| {loads} |"
        )
    slots = rows[0]["slots"] * 3 * rows[0]["hidden"] * rows[0]["inner"] * 2 / 2**20
    memory = f"{rows[0]['slots']} slots take {slots:.0f} MiB of a rank in BF16 where all layers "
    memory += f"share them, {_MODEL_LAYERS * slots / 1024:.1f} GiB where each has its own."
    return "\n".join([*lines, "", memory])


def _answers(parts: Mapping[str, Any]) -> str:
    lines = ["| | same greedy tokens |", "|---|---|"]
    for part in _ANSWERS:
        rows = [row for row in _rows(parts, part) if "same" in row]
        lines += [f"| {row['what']} | {row['same']} of {row['answers']} |" for row in rows]
        lines += [] if rows else [f"| {_missing(parts, part)} | |"]
    return "\n".join(lines)
