"""A checkpoint whose own router routes as recorded, for any engine that serves Qwen3-MoE.

Every recorded token is a word. Its embedding holds, for each layer, a code of E dimensions with K
values at the recorded experts and 0 elsewhere. No block writes to these dimensions, so the residual
stream carries the codes through all layers, and each router reads its own: norms scale a code and
keep its order. All other weights are random; what such a model says means nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ultraep_lab.demo.text import SPECIAL_TOKENS, save_tokenizer
from ultraep_serve.errors import ConfigError

_FIRST = len(SPECIAL_TOKENS)  # id of recorded token 0
_LEAST, _MOST = 1.0, 2.0  # of a code; six values between them stay apart in bfloat16
_GATE = 4.0  # what routers multiply a code by


@dataclass(frozen=True)
class RecordedSpec:
    """Sizes of the model beside those that the recorded ids give."""

    num_experts: int = 64  # E
    content_size: int = 512  # of the hidden state, beside the codes
    moe_intermediate_size: int = 512
    num_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 16384
    seed: int = 0


def recorded_text(tokens: NDArray[np.integer]) -> str:
    """The prompt of the recorded ``tokens`` (T,), each of which is one token of the model."""
    return " ".join(map(_word, tokens.tolist()))


def make_recorded_model(path: Path, ids: NDArray[np.integer], spec: RecordedSpec) -> Path:
    """Write a bfloat16 checkpoint that routes token n in layer l to ``ids[n, l]``, and return that.

    ``ids`` (N, layers, K), the first expert with the largest weight. Raises ConfigError for ids
    that are no choice of K different experts.
    """
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    ordered = np.sort(ids, axis=-1)
    if ordered.max() >= spec.num_experts or (np.diff(ordered, axis=-1) == 0).any():
        raise ConfigError(f"each token needs different experts below {spec.num_experts = }")
    path.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL_TOKENS, *map(_word, range(len(ids)))]
    save_tokenizer(path, words, spec.max_position_embeddings)
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        vocab_size=len(words),
        hidden_size=_code_size(ids, spec) + spec.content_size,
        intermediate_size=2 * spec.moe_intermediate_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        num_hidden_layers=ids.shape[1],
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        num_experts=spec.num_experts,
        num_experts_per_tok=ids.shape[2],
        norm_topk_prob=True,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(path)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in _tensors(ids, spec)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _word(token: int) -> str:
    return f"t{token}"


def _code_size(ids: NDArray[np.integer], spec: RecordedSpec) -> int:
    return int(ids.shape[1]) * spec.num_experts


def _tensors(ids: NDArray[np.integer], spec: RecordedSpec) -> Iterator[tuple[str, Tensor]]:
    """All tensors by their names in a Qwen3-MoE checkpoint."""
    generator = torch.Generator().manual_seed(spec.seed)
    codes = _code_size(ids, spec)
    hidden, inner = codes + spec.content_size, spec.moe_intermediate_size
    queries, keys = (n * spec.head_dim for n in (spec.num_heads, spec.num_key_value_heads))

    def matrix(outputs: int, inputs: int) -> Tensor:
        drawn: Tensor = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return drawn

    def to_stream(inputs: int) -> Tensor:
        written = matrix(hidden, inputs)
        written[:codes] = 0
        return written

    yield "model.embed_tokens.weight", _embeddings(ids, spec, generator)
    yield "model.norm.weight", torch.ones(hidden)
    yield "lm_head.weight", matrix(_FIRST + len(ids), hidden)
    for layer in range(ids.shape[1]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", torch.ones(hidden)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(hidden)
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{prefix}.self_attn.{name}.weight", matrix(size, hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", torch.ones(spec.head_dim)
        yield f"{prefix}.self_attn.o_proj.weight", to_stream(queries)
        gate = torch.zeros(spec.num_experts, hidden)
        own = slice(layer * spec.num_experts, (layer + 1) * spec.num_experts)
        gate[:, own].fill_diagonal_(_GATE)
        yield f"{prefix}.mlp.gate.weight", gate
        for expert in range(spec.num_experts):
            experts = f"{prefix}.mlp.experts.{expert}"
            yield f"{experts}.gate_proj.weight", matrix(inner, hidden)
            yield f"{experts}.up_proj.weight", matrix(inner, hidden)
            yield f"{experts}.down_proj.weight", to_stream(inner)


def _embeddings(ids: NDArray[np.integer], spec: RecordedSpec, generator: torch.Generator) -> Tensor:
    """Rows (V, H): the codes of all layers, then content."""
    num_tokens, num_layers, chosen = ids.shape
    codes = torch.zeros(_FIRST + num_tokens, num_layers, spec.num_experts)
    values = torch.linspace(_MOST, _LEAST, chosen).expand(num_tokens, num_layers, -1)
    codes[_FIRST:].scatter_(2, torch.from_numpy(ids.astype(np.int64)), values)
    content = torch.randn(len(codes), spec.content_size, generator=generator)
    return torch.cat([codes.flatten(1), content], dim=1)
