"""docs/families.md, made from the JSON of `benchmarks/families.py`.

python -m docs.generate.families     # brings it up to date
"""

import json
from typing import Any

from benchmarks.model_families.table import FAMILIES
from docs.generate.reference import DOCS

__all__ = ["FAMILIES", "PAGE", "page"]

PAGE = DOCS / "families.md"
_RESULTS = DOCS.parent / "benchmarks" / "results"
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
answers compared token by token. `families-vllm.json` and `families-sglang.json` of
`benchmarks/results/` have every figure and reason.

"""
_REST = """
A family that is not listed is balanced if its layers pass the checks at load. Otherwise the server
refuses to start and names the layer. On GPUs engines serve more models: see [GPUs](gpus.md).

## Models in a folder of their own in vLLM

vLLM keeps its newest models in `vllm/models`. Most of them need GPUs, so none was served. Their
source in vLLM 0.33 says this:

| model | experts |
|---|---|
| DeepSeek-V4, DeepSeek-V4.1, Kimi-K3 | in vLLM's usual layers, or with `--moe-backend \
deep_gemm_mega_moe` in modules of its native megakernel: balanced if these pass the checks at load |
| Muse Spark, Step5 | the same, but their modules for `deep_gemm_mega_moe` are refused, and so is \
Muse Spark's own kernel for NVFP4 |
| DeepSeek-V3.2, dots3-note, GLM-5 and GLM-5-Next, Hy-V4, Inkling, MiniMax-M3, Qwen4-Exp, Beam, \
Flint | in vLLM's usual layers; the experts of dots3-note's vision part are on every rank and stay \
as they are |

DeepSeek-V4 can run on CPUs. Its checkpoints have FP4 or FP8 experts, which vLLM computes on CPUs
with AMX only.
"""


def page() -> str:
    """The text of the page."""
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


def _document(engine: str) -> dict[str, Any]:
    return dict(json.loads((_RESULTS / f"families-{engine}.json").read_text()))


if __name__ == "__main__":
    PAGE.write_text(page())
