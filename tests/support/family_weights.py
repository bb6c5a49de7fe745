"""Weights of tiny checkpoints: random matrices, routers that prefer some experts, draft layers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["draw_weights", "keep_draft_layer"]

SHARED_DIRECTION = 0.7  # of a word's embedding: what routers recognise in every token
PREFERENCE = 2.0  # added to the logits of preferred experts; they vary by about 1 over tokens
MATRIX_STD = 0.08
HEAD_STD = 0.4  # logits far enough apart that rounding does not change the best
BIAS_STD = 0.03

_EMBEDDING = re.compile(r"(embed_tokens|embeddings|wte)\.weight$")
_HEAD = re.compile(r"lm_head\.weight$")
_ROUTER = re.compile(r"\.(gate|router)\.((layer|wg|classifier)\.)?weight$")
_SCORE_BIAS = re.compile(r"(e_score_correction_bias|expert_bias|router\.bias)$")


def draw_weights(model: Any, num_experts: int, num_zero_experts: int, num_hot: int) -> None:
    """Fill matrices, embeddings, head, routers; the rest stays as the library initialises it.

    All embeddings share one direction. In router n the rows of ``num_hot`` experts of rank n % 2
    look that way, and those of zero experts, if there are any.
    """
    routed = num_experts + num_zero_experts
    vocabulary = model.config.get_text_config().vocab_size
    routers = 0
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if _EMBEDDING.search(name) and len(weight) == vocabulary:
            direction = torch.randn(weight.shape[1]).sign()
            noise = torch.randn_like(weight) * (1 - SHARED_DIRECTION**2) ** 0.5
            weight.copy_(noise + SHARED_DIRECTION * direction)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if _ROUTER.search(name) and len(weight) == routed:
            weight.copy_(_router_rows(direction, num_experts, num_zero_experts, num_hot, routers))
            routers += 1
        elif _SCORE_BIAS.search(name):
            weight.normal_(std=BIAS_STD)
        elif weight.ndim > 1 and not _EMBEDDING.search(name):
            weight.normal_(std=HEAD_STD if _HEAD.search(name) else MATRIX_STD)


def _router_rows(
    direction: Tensor, num_experts: int, num_zero_experts: int, num_hot: int, layer: int
) -> Tensor:
    """Rows (E + zero experts, H) whose logits vary by about 1 between tokens."""
    size = len(direction)
    rows = torch.randn(num_experts + num_zero_experts, size) / size**0.5
    first = (layer % 2) * (num_experts // 2)
    towards = PREFERENCE / SHARED_DIRECTION * direction / size
    rows[first : first + num_hot] += towards
    rows[num_experts:] += towards
    return rows


def keep_draft_layer(path: Path, place: str, architecture: str) -> None:
    """Turn the last decoder layer of the checkpoint at ``path`` into a draft (MTP) layer.

    ``place`` is where published checkpoints have it: "model.layers", behind the model's own, or
    "mtp.layers"; "" where there is none. ``architecture`` replaces the name in the configuration,
    unless it is "".
    """
    file = path / "config.json"
    config = json.loads(file.read_text())
    if architecture:
        config["architectures"] = [architecture]
    if place:
        _add_draft(path / "model.safetensors", config, place)
    file.write_text(json.dumps(config, indent=2))


def _add_draft(file: Path, config: dict[str, Any], place: str) -> None:
    """``config`` is changed in place: one layer less, one draft layer."""
    from safetensors.torch import load_file, save_file

    sizes = config.get("text_config", config)
    for name, value in sizes.items():
        if isinstance(value, list) and len(value) == sizes["num_hidden_layers"]:
            sizes[name] = value[:-1]  # by layer
    sizes["num_hidden_layers"] -= 1
    last, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    weights = load_file(file)
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
    weights |= {f"{prefix}.{name}": weight.clone() for name, weight in added.items()}
    save_file(weights, file, metadata={"format": "pt"})
