"""docs/dev/families.md, made from the JSON of `benchmarks/families.py`.

python -m tests.support.families_page     # brings the page up to date
"""

import json
from pathlib import Path
from typing import Any

from tests.support.family_table import FAMILIES

__all__ = ["FAMILIES", "PAGE", "page"]

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "dev" / "families.md"
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_INTRO = """\
# Model families

Which Mixture-of-Experts models are balanced, found by serving each: a tiny checkpoint with random
weights of the family's own architecture (`tests/support/families.py`), two ranks of a CPU, tensor
and expert parallel. The router prefers a few experts of one rank. The same 14 prompts of 100 to 295
tokens are asked with policy `quota` and with policy `off`, 16 greedy tokens each.
`make test-families` runs all of it; figures are in `families-vllm.json` and `families-sglang.json`,
and this page is made from them (`tests/support/families_page.py`).

| verdict | |
|---|---|
| balanced | every MoE layer is balanced, and answers are those of policy `off` |
| refused | refused before the first request, with the reason; the engine alone serves it |
| unserved | the engine alone does not serve the model on a CPU, for its own reason |
| failed | anything else |

Imbalance: the largest of all batches and layers, before and after. Tokens: prompts whose tokens are
the same with `quota` and `off`. Log-probabilities: the largest difference at any token of a prompt;
for models in bfloat16 also that of `off` against `off`, asked once more. Against transformers: the
same of `off` against that library in float32, which shows that the engine computes this model.
"""


def page() -> str:
    """The text of the page."""
    return _INTRO + "".join(_section(engine) for engine in _ENGINES)


def _section(engine: str) -> str:
    path = _ROOT / "benchmarks" / "results" / f"families-{engine}.json"
    document = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    rows = document["rows"]
    count = sum(row["verdict"] == "balanced" for row in rows)
    head = ("family", "what is special", "type", "verdict", "MoE layers", "imbalance", "tokens",
            "log-probabilities", "against transformers")  # fmt: skip
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
        return (*first, f"0 of {row['moe_layers']}", "", "", "", "")
    layers, quota, control = row["layers"], row["quota"], row["control"]
    apart = f"{quota['logprobs']:.2g}"
    if row["dtype"] != "float32":
        apart += f" (off: {control['logprobs']:.2g})"
    worst = [max(layer[i] for layer in layers.values()) for i in range(2)] if layers else []
    return (
        *first,
        f"{len(layers)} of {row['moe_layers']}",
        " -> ".join(f"{value:.3f}" for value in worst),
        f"{quota['same_tokens']} of {quota['prompts']}",
        apart,
        "" if row.get("transformers") is None else f"{row['transformers']:.2g}",
    )


def _one_line(reason: str) -> str:
    """As code where it has signs that Markdown would take for its own."""
    text = " ".join(reason.split())
    return f"`{text}`" if set(text) & set("<>_*|") and "`" not in text else text


if __name__ == "__main__":
    PAGE.write_text(page())
