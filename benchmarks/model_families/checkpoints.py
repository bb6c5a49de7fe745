"""Tiny checkpoints of the model families that people serve: random weights, real code paths.

``make_family(path, name)`` writes what transformers, vLLM and SGLang load offline, in seconds:
config.json, weights under the names of published checkpoints, and the demo's tokenizer. The router
prefers a few experts of one rank (of two), another rank in the next layer, so that there is
something to balance.
"""

import functools
import json
import re
from contextlib import ExitStack
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from benchmarks.model_families.table import COMMON, CONTEXT, FAMILIES, Family
from ultraep_lab.demo.text import save_tokenizer, vocabulary

SHARED_DIRECTION = 0.7  # of a word's embedding: what routers recognise in every token
HOT_SHARE = 0.63  # of the tokens that choose a preferred expert, about
CALIBRATION_LENGTH = 128  # tokens of a text
MATRIX_STD = 0.08
HEAD_STD = 0.4  # logits far enough apart that rounding does not change the best
BIAS_STD = 0.03

_EMBEDDING = re.compile(r"(embed_tokens|embeddings|wte)\.weight$")
_HEAD = re.compile(r"lm_head\.weight$")
_ROUTER = re.compile(r"\.(gate|router)\.((layer|wg|classifier)\.)?weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SCORE_BIAS = re.compile(r"(e_score_correction_bias|expert_bias|router\.bias)$")


def make_family(path: Path, name: str) -> Path:
    """Write the checkpoint of ``FAMILIES[name]`` to the directory ``path``, and return that."""
    family = FAMILIES[name]
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, vocabulary(), CONTEXT)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = _build(family)
        with torch.no_grad():
            routers = _draw_weights(model, family)
        assert routers == family.counts.layers + bool(family.draft), f"{name}: {routers = }"
        model.save_pretrained(path)
        _publish(path, family)
    return path


def _build(family: Family) -> Any:
    """The model of transformers, with a decoder layer more where there is a draft."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    counts = dict(zip(family.names, family.counts, strict=False))
    values = {**COMMON, **counts, **family.config}
    dtype = getattr(torch, family.dtype)
    if family.draft:
        values["num_hidden_layers"] += 1
        if "layer_types" in values:
            values["layer_types"] = [*values["layer_types"], "full_attention"]
    if family.wrapper is None:
        config = AutoConfig.for_model(family.model_type, **values)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    ids = {name: values[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    special = {f"{kind}_token_id": 3 for kind in ("image", "video", "vision_start", "vision_end")}
    config = AutoConfig.for_model(
        family.model_type, text_config=values, tie_word_embeddings=False, **family.wrapper,
        **ids, **special,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def _draw_weights(model: Any, family: Family) -> int:
    """Fill matrices, embeddings, head and routers, and return the number of routers.

    Other weights stay as the library initialises them.
    All embeddings share one direction, so that the inputs of a router have something in common.
    One pass over made-up text sets each router just before it runs: in the n-th, ``num_hot``
    experts of rank n % 2 are preferred, and zero experts, if there are any.
    """
    vocabulary = model.config.get_text_config().vocab_size
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if _EMBEDDING.search(name) and len(weight) == vocabulary:
            noise = torch.randn_like(weight) * (1 - SHARED_DIRECTION**2) ** 0.5
            weight.copy_(noise + SHARED_DIRECTION * torch.randn_like(weight[0]).sign())
        elif _SCORE_BIAS.search(name):
            weight.normal_(std=BIAS_STD)
        elif weight.ndim > 1 and "embed" not in name:
            weight.normal_(std=HEAD_STD if _HEAD.search(name) else MATRIX_STD)
    return _set_routers(model, family)


def _set_routers(model: Any, family: Family) -> int:
    experts, layer = family.counts.experts, 0
    routed = experts + family.num_zero_experts
    normal = NormalDist()  # of a token's logits: which of them are among the best K
    usual = family.counts.per_token / routed
    preference = normal.inv_cdf(1 - usual) - normal.inv_cdf(1 - HOT_SHARE)

    def on_router(weight: Tensor, router: Any, args: tuple[Tensor, ...]) -> None:
        nonlocal layer
        first = (layer % 2) * (experts // 2)
        layer += 1
        hot = [*range(first, first + family.num_hot), *range(experts, routed)]
        rows = _router_rows(args[0].flatten(0, -2).float(), len(weight), hot, preference)
        weight.copy_(rows)

    with ExitStack() as hooks:
        for name, weight in model.named_parameters():
            found = _ROUTER.search(name)
            if found and len(weight) == routed:
                router = model.get_submodule(name[: found.end(1)])
                handle = router.register_forward_pre_hook(functools.partial(on_router, weight))
                hooks.callback(handle.remove)
        vocabulary = model.config.get_text_config().vocab_size
        words = torch.randint(4, vocabulary, (4, CALIBRATION_LENGTH))
        model.eval()(input_ids=words, use_cache=False)
    return layer


def _router_rows(hidden: Tensor, num_rows: int, hot: list[int], preference: float) -> Tensor:
    """Rows (E + zero experts, H) whose logits on ``hidden`` (T, H) vary by 1 between tokens.

    Their means are 0, and ``preference`` for ``hot`` ones.
    """
    mean = hidden.mean(0)
    towards = mean / mean.square().sum()
    rows = torch.randn(num_rows, hidden.shape[1])
    rows -= (rows @ mean).unsqueeze(1) * towards
    rows /= (hidden @ rows.T).std(0).unsqueeze(1)
    rows[hot] += preference * towards
    return rows


def _publish(path: Path, family: Family) -> None:
    """Make what transformers saved at ``path`` what publishers give."""
    from safetensors.torch import load_file, save_file

    file = path / "config.json"
    config = json.loads(file.read_text())
    weights = load_file(path / "model.safetensors")
    numbers = {name: _EXPERT.search(name) for name in weights}
    for name, found in numbers.items():
        if found and int(found[1]) >= family.counts.experts:
            del weights[name]
    for old, new in family.renamed.items():
        weights = {re.sub(rf"^{re.escape(old)}", new, name): weights[name] for name in weights}
    if family.draft:
        weights = _with_draft(weights, config, family.draft)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config |= family.published
    gone = {name for name, value in family.published.items() if value is None}
    kept = {name: value for name, value in config.items() if name not in gone}
    file.write_text(json.dumps(kept, indent=2))
    if family.preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(family.preprocessor, indent=2))


def _with_draft(
    weights: dict[str, Tensor], config: dict[str, Any], place: str
) -> dict[str, Tensor]:
    """``weights`` with a draft layer; ``config`` is changed in place: one layer less, one draft."""
    sizes = config.get("text_config", config)
    for name, value in sizes.items():
        if isinstance(value, list) and len(value) == sizes["num_hidden_layers"]:
            sizes[name] = value[:-1]  # by layer
    sizes["num_hidden_layers"] -= 1
    last, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    head = weights["lm_head.weight"]
    (embedding,) = (weight for name, weight in weights.items() if _EMBEDDING.search(name))
    norm = next(weight for name, weight in weights.items() if name.endswith(".norm.weight"))
    projection = (torch.randn(hidden, 2 * hidden) * MATRIX_STD).to(head.dtype)
    if place == "model.layers":
        sizes["num_nextn_predict_layers"] = 1
        prefix = f"model.layers.{last}"
        added = {
            "enorm.weight": norm,
            "hnorm.weight": norm,
            "eh_proj.weight": projection,
            "embed_tokens.weight": embedding,
            "shared_head.norm.weight": norm,
            "shared_head.head.weight": head,
        }
    else:
        sizes["mtp_num_hidden_layers"] = 1
        prefix = "mtp"
        own = re.compile(rf"^model\.(language_model\.)?layers\.{last}\.")
        weights = {own.sub("mtp.layers.0.", name): weight for name, weight in weights.items()}
        added = {
            "pre_fc_norm_embedding.weight": norm,
            "pre_fc_norm_hidden.weight": norm,
            "fc.weight": projection,
            "norm.weight": norm,
        }
    return weights | {f"{prefix}.{name}": weight.clone() for name, weight in added.items()}
