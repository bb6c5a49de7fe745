"""The pages of model families, made from the JSON of `benchmarks/families.py`.

    python -m docs.generate.families     # brings both up to date

docs/families.md is for users; benchmarks/results/families.md has every figure.
"""

import json
from typing import Any

from benchmarks.model_families.table import FAMILIES
from docs.generate.reference import DOCS

__all__ = ["DETAILS_PAGE", "FAMILIES", "PAGE", "details", "page"]

PAGE = DOCS / "families.md"
_RESULTS = DOCS.parent / "benchmarks" / "results"
DETAILS_PAGE = _RESULTS / "families.md"
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_SAYS = {
    "balanced": "balanced, with the same tokens",
    "refused": "refused, with the reason",
    "unserved": "not served by the engine alone on a CPU",
    "untried": "not tried",
}
_INTRO = """\
# Model families

These Mixture-of-Experts models were served on two CPU ranks, each as a tiny model with random
weights of the family's own architecture. 14 prompts were asked with balancing on and off, and their
answers compared token by token. `benchmarks/results/families.md` has every figure and reason.

"""
_REST = """
A family that is not listed is balanced if its layers pass the checks at load. Otherwise the server
refuses to start and names the layer. On GPUs engines serve more models: see [GPUs](gpus.md).

## Models in a folder of their own in vLLM

vLLM keeps its newest models in `vllm/models`. Most of them need GPUs, so none was served. Their
source in vLLM 0.33 says this:

| model | experts |
|---|---|
| DeepSeek-V4, DeepSeek-V4.1, Kimi-K3, Step5 | in vLLM's usual layers: balanced if these pass the \
checks at load. *MegaMoE* (`--moe-backend deep_gemm_mega_moe` and its like) dispatches and \
computes in one kernel: refused by the flag's name |
| Muse Spark | the same; its own kernel for NVFP4 is refused by name |
| DeepSeek-V3.2, dots3-note, GLM-5 and GLM-5-Next, Hy-V4, Inkling, MiniMax-M3, Qwen4-Exp, Beam, \
Flint | in vLLM's usual layers; the experts of dots3-note's vision part are on every rank and stay \
as they are |

DeepSeek-V4 can run on CPUs. Its checkpoints have FP4 or FP8 experts, which vLLM computes on CPUs
with AMX only.
"""
_DETAILS = """\
# Model families: every figure

[The page for users](../../docs/families.md) lists the verdicts. Each family is a tiny checkpoint
with random weights (`benchmarks/model_families/checkpoints.py`), whose router prefers a few experts
of one rank. It is served on two ranks of a CPU, tensor and expert parallel. 14 prompts of 100 to
295 tokens are asked with policy `quota` and with policy `off`, 16 greedy tokens each.
`make test-families` runs all of it. Figures are in `families-vllm.json` and `families-sglang.json`;
both pages are made from them (`docs/generate/families.py`).

| column | |
|---|---|
| self-check | `--self-check full`: layers whose answers were compared; layers that were \
checked in service (`--verify-every 1`). A family is "failed" if one of these did |
| imbalance | the largest of all batches and layers, before and after |
| tokens | prompts whose tokens are the same with `quota` and `off` |
| log-probabilities | the largest difference at any token of a prompt; in brackets of two `off` |
| against transformers | the same of `off` and that library in float32 |

"Unserved" means that the engine alone does not serve the model on a CPU. A small difference from
transformers shows that the engine computes this model.
"""


def page() -> str:
    """The text of the page for users."""
    return _INTRO + "\n".join(map(_verdicts, _ENGINES)) + _REST


def _verdicts(engine: str) -> str:
    """The families of each verdict, in a list."""
    document = _document(engine)
    rows = {row["family"]: row["verdict"] for row in document["rows"]}
    name = _ENGINES[engine]
    version = next(v for package, v in document["versions"].items() if package != "transformers")
    lines = [
        f"- {says}: {', '.join(found)}."
        for verdict, says in _SAYS.items()
        if (found := [family for family in FAMILIES if rows.get(family, "untried") == verdict])
    ]
    return f"**{name} {version}**\n\n" + "\n".join(lines) + "\n"


def details() -> str:
    """The text of the page for authors."""
    return _DETAILS + "".join(_section(engine) for engine in _ENGINES)


def _document(engine: str) -> dict[str, Any]:
    return dict(json.loads((_RESULTS / f"families-{engine}.json").read_text()))


def _section(engine: str) -> str:
    document = _document(engine)
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    rows = document["rows"]
    count = sum(row["verdict"] == "balanced" for row in rows)
    head = ("family", "what is special", "type", "verdict", "MoE layers", "self-check", "imbalance",
            "tokens", "log-probabilities", "against transformers")  # fmt: skip
    table = [head, ("---",) * len(head), *map(_cells, rows)]
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    reasons = [
        f"- {row['family']}, {row['verdict']}: {_one_line(row['reason'])}"
        for row in rows
        if row["verdict"] != "balanced"
    ]
    reasons += [_alone(row, _ENGINES[engine]) for row in rows if "alone" in row]
    measured = {row["family"] for row in rows}
    if missing := [name for name in FAMILIES if name not in measured]:
        reasons.append(f"- Not run: {', '.join(missing)}")
    title = f"## {_ENGINES[engine]}\n\n{versions}: {count} of {len(rows)} balanced."
    parts = [title, "\n".join(lines), *(["\n".join(reasons)] if reasons else [])]
    return "".join(f"\n{part}\n" for part in parts)


def _alone(row: dict[str, Any], engine: str) -> str:
    """What is known of a row that is far from transformers: how far it is from the engine alone."""
    apart = {key: f"{value:.2g}" for key, value in row["alone"].items()}
    return (
        f"- {row['family']}: {row['transformers']:.2g} apart from transformers; from {engine} "
        f"alone {apart.get('two_ranks', '?')} on two ranks and {apart.get('one_rank', '?')} on "
        f"one, which are {apart.get('between', '?')} apart."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    first = (row["family"], FAMILIES[row["family"]].special, row["dtype"], row["verdict"])
    if "layers" not in row:
        return (*first, f"0 of {row['moe_layers']}", "", "", "", "", "")
    layers, quota, control = row["layers"], row["quota"], row["control"]
    apart = f"{quota['logprobs']:.2g}"
    if row["dtype"] != "float32":
        apart += f" (off: {control['logprobs']:.2g})"
    worst = [max(layer[i] for layer in layers.values()) for i in range(2)] if layers else []
    return (
        *first,
        f"{len(layers)} of {row['moe_layers']}",
        _proof(row),
        " -> ".join(f"{value:.3f}" for value in worst),
        f"{quota['same_tokens']} of {quota['prompts']}",
        apart,
        "" if row.get("transformers") is None else f"{row['transformers']:.2g}",
    )


def _proof(row: dict[str, Any]) -> str:
    if "self_check" not in row:
        return "not run"
    checked, verified = row["self_check"], row["verification"]
    return (
        f"{checked['result']}, {checked['checks']['answers']}; {verified['layers']} layers sampled"
    )


def _one_line(reason: str) -> str:
    """As code where it has signs that Markdown would take for its own."""
    text = " ".join(reason.split())
    return f"`{text}`" if set(text) & set("<>_*|") and "`" not in text else text


if __name__ == "__main__":
    PAGE.write_text(page())
    DETAILS_PAGE.write_text(details())
