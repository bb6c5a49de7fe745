"""Model shapes: the sizes in a Hugging Face ``config.json`` that the work depends on.

The built-in ones hold the values of the models' public configurations. GLM-4.7 is taken to have
the shape of GLM-4.5 (355B), whose model class it shares.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_object

__all__ = [
    "PRESETS",
    "WEIGHT_BITS",
    "ModelShape",
    "model_shape",
    "shape_from_config",
    "weight_bits",
]

# Bits per weight with its scales: FP8 one float32 per block of 128 x 128, FP4 one byte per 16.
WEIGHT_BITS = MappingProxyType({"bf16": 16.0, "fp8": 8 + 32 / 128**2, "fp4": 4 + 8 / 16})
MATRICES = 3  # gate, up, down
KV_BYTES = 2  # of one cached value, BF16
_MOST = 1 << 20  # of any size; no model has more


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model; FLOPs count a multiply-add as two."""

    name: str
    hidden_size: int
    expert_size: int  # moe_intermediate_size
    num_experts: int  # E
    experts_per_token: int  # K
    num_moe_layers: int
    num_dense_layers: int
    dense_size: int  # intermediate_size of dense layers
    shared_size: int  # intermediate sizes of the shared experts, summed
    attention_weights: int  # of the projections of one layer
    score_flops: int  # per token and token of context: scores and values
    kv_values: int  # cached per token and layer

    def expert_bytes(self, weight_type: str) -> int:
        """Weights and scales of one expert."""
        return round(self.expert_weights * weight_bits(weight_type) / 8)

    @property
    def expert_weights(self) -> int:
        """Parameters of one expert."""
        return MATRICES * self.hidden_size * self.expert_size

    @property
    def expert_flops(self) -> int:
        """FLOPs of one assignment."""
        return 2 * self.expert_weights

    @property
    def shared_flops(self) -> int:
        """FLOPs per token of a MoE layer beside its routed experts: projections, shared expert."""
        shared = MATRICES * self.hidden_size * self.shared_size
        return 2 * (self.attention_weights + shared + self.hidden_size * self.num_experts)

    @property
    def dense_flops(self) -> int:
        """FLOPs per token of a dense layer, projections included."""
        return 2 * (self.attention_weights + MATRICES * self.hidden_size * self.dense_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token, all layers, BF16."""
        return KV_BYTES * self.kv_values * (self.num_moe_layers + self.num_dense_layers)

    @property
    def weights(self) -> int:
        """Parameters without embeddings, norms and multi-token prediction."""
        layers = self.num_moe_layers + self.num_dense_layers
        moe = self.num_experts * self.expert_weights + self.hidden_size * self.num_experts
        moe += MATRICES * self.hidden_size * self.shared_size
        dense = MATRICES * self.hidden_size * self.dense_size
        return (
            layers * self.attention_weights
            + self.num_moe_layers * moe
            + self.num_dense_layers * dense
        )


def weight_bits(weight_type: str) -> float:
    """Bits per weight with scales. Raises ConfigError naming the known types."""
    try:
        return WEIGHT_BITS[weight_type]
    except KeyError:
        names = ", ".join(WEIGHT_BITS)
        raise ConfigError(f"unknown weight type {weight_type!r}; choose from {names}") from None


def model_shape(name_or_path: str) -> ModelShape:
    """A built-in shape by name, or that of a ``config.json`` or its directory.

    Raises ConfigError: no such name or file, or not the configuration of a MoE model.
    """
    if name_or_path.lower() in PRESETS:
        name = name_or_path.lower()
        return shape_from_config(PRESETS[name], name)
    path = Path(name_or_path)
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise ConfigError(
            f"{name_or_path!r} is neither a config.json nor one of {', '.join(PRESETS)}"
        )
    config = read_object(path, "the model's configuration")
    return shape_from_config(config, path.parent.name or path.name)


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that ``config``, in Hugging Face's names, describes.

    Raises ConfigError: a size is missing or is no positive whole number.
    """
    config = config.get("text_config") or config  # multimodal models nest the language model
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}: text_config must be a JSON object")
    reader = _Reader(config, name)
    hidden = reader.size("hidden_size")
    layers = reader.size("num_hidden_layers")
    dense = _dense_layers(reader, layers)
    attention, score_flops, kv_values = _attention(reader, hidden)
    expert_size = reader.size("moe_intermediate_size", "intermediate_size")
    return ModelShape(
        name=name,
        hidden_size=hidden,
        expert_size=expert_size,
        num_experts=reader.size("num_experts", "n_routed_experts", "num_local_experts"),
        experts_per_token=reader.size("num_experts_per_tok"),
        num_moe_layers=layers - dense,
        num_dense_layers=dense,
        dense_size=reader.size("intermediate_size") if dense else 0,
        shared_size=reader.optional("shared_expert_intermediate_size")
        or reader.optional("n_shared_experts") * expert_size,
        attention_weights=attention,
        score_flops=score_flops,
        kv_values=kv_values,
    )


class _Reader:
    """Sizes out of a configuration, by any of their names."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def size(self, *names: str) -> int:
        """The first of ``names`` that is there. Raises ConfigError."""
        for name in names:
            if self._config.get(name) is not None:
                return self._checked(name, least=1)
        raise self.error(f"{' or '.join(names)} is missing; is this a MoE model?")

    def optional(self, name: str, default: int = 0) -> int:
        """The same, or ``default`` where it is missing or null."""
        return default if self._config.get(name) is None else self._checked(name, least=0)

    def listed(self, name: str) -> list[int]:
        """A list of layer numbers, empty where it is missing."""
        value = self._config.get(name)
        return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []

    def error(self, text: str) -> ConfigError:
        """The error for sizes that contradict each other."""
        return ConfigError(f"{self._name}: {text}")

    def _checked(self, name: str, least: int) -> int:
        value = self._config[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self.error(f"{name} = {value!r} must be a whole number, {least} to {_MOST}")
        return value


def _dense_layers(reader: _Reader, layers: int) -> int:
    """DeepSeek and GLM say how many layers come first; Qwen lists them, or every n-th is MoE."""
    first = reader.optional("first_k_dense_replace")
    listed = len(set(reader.listed("mlp_only_layers")))
    step = max(1, reader.optional("decoder_sparse_step", 1))
    dense = first or listed or layers - layers // step
    if not 0 <= dense < layers:
        raise ConfigError(f"{dense} of {layers} layers are dense: no MoE layer is left")
    return dense


def _attention(reader: _Reader, hidden: int) -> tuple[int, int, int]:
    """Projection weights, FLOPs per token and context token, cached values per token."""
    heads = reader.size("num_attention_heads")
    rank = reader.optional("kv_lora_rank")
    if not rank:
        kv_heads = reader.optional("num_key_value_heads") or heads
        size = reader.optional("head_dim") or hidden // heads
        if not size:
            raise reader.error(f"{heads} attention heads share a hidden size of {hidden}")
        return 2 * hidden * size * (heads + kv_heads), 4 * heads * size, 2 * kv_heads * size
    rope = reader.size("qk_rope_head_dim")
    nope = reader.size("qk_nope_head_dim")
    value = reader.size("v_head_dim")
    query_rank = reader.optional("q_lora_rank")
    width = heads * (nope + rope)
    query = query_rank * (hidden + width) if query_rank else hidden * width
    weights = (
        query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    )
    return weights, 2 * heads * (nope + rope + value), rank + rope


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3-235b-a22b": {
            "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
            "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
        },
        "qwen3-30b-a3b": {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
            "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        },
        "glm-4.7": {
            "hidden_size": 5120, "moe_intermediate_size": 1536, "num_hidden_layers": 92,
            "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "first_k_dense_replace": 3, "intermediate_size": 12288,
        },
        "deepseek-v3": {
            "hidden_size": 7168, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "num_attention_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 3, "intermediate_size": 18432,
        },
        "deepseek-v2-lite": {
            "hidden_size": 2048, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 1, "intermediate_size": 10944,
        },
    }
)  # fmt: skip
