"""SGLang 0.5.23: what it has compiled, in plain torch, and its Triton kernels that take too long.

Each does what SGLang's own says it does, with the same arguments. All other operators and functions
that are compiled for CUDA raise when they are called. What SGLang compiles as it starts is compiled
here too, so that one that does not compile is an error.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.emulated_gpu.operators.host import in_stream
from tests.emulated_gpu.operators.interpreter import REFERENCES
from tests.emulated_gpu.references.attention import decode_attention, extend_attention
from tests.emulated_gpu.references.contract import of_signature, refusing, replace_operators
from tests.emulated_gpu.references.experts import fused_moe_kernel
from tests.emulated_gpu.references.layers import (
    fused_add_rms_norm,
    in_blocks,
    likeliest,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from tests.emulated_gpu.references.quantisation import by_group

__all__ = ["compute_sglang"]

LEAST_LARGEST = 1e-10  # of a group's values, as its scale has it


@cache  # plug-ins may be called again
def compute_sglang() -> None:
    """Put references in the place of what SGLang has compiled, once in every process."""
    import sgl_kernel  # noqa: F401
    from sglang.kernels.jit.utils.compile import loader
    from sglang.kernels.ops.attention import decode_attention as of_decode
    from sglang.kernels.ops.attention import extend_attention as of_extend

    REFERENCES["fused_moe_kernel"] = fused_moe_kernel
    REFERENCES["_router_triton_kernel"] = router_triton_kernel
    REFERENCES.update(_fwd_kernel_ep_scatter_2=ep_scatter, _fwd_kernel_ep_gather=ep_gather)
    replace_operators("sgl_kernel", _OPERATORS, _LOOK_AT_NO_VALUES)
    for module, name, function in (
        (of_extend, "extend_attention_fwd", extend_attention),
        (of_decode, "decode_attention_fwd", decode_attention),
    ):
        setattr(module, name, of_signature(getattr(module, name), function))
    load = loader._load
    loader._load = lambda library: _Computed(load(library), library)


class _Computed:
    """A module that SGLang has compiled, whose functions are computed by references."""

    def __init__(self, compiled: Any, library: Path) -> None:
        self._compiled = compiled  # stays loaded
        self._name = library.stem.removeprefix("sgl_kernel_jit_")
        of_name = (each for name, each in _MODULES.items() if self._name.startswith(name))
        self._references = next(of_name, {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._references.get(name) or refusing(f"{self._name}.{name}")


# ---- Triton kernels


def router_triton_kernel(it: SimpleNamespace) -> bool:
    """The likeliest experts by softmax alone."""
    further = "HAS_BIAS", "HAS_SOFTCAP", "APPLY_SCALE", "HAS_PADDING", "HAS_PACKED"
    is_plain = it.SCORING_FUNC == 2 and it.N_GROUP == 1 and it.K_ROUTED == it.K
    if not is_plain or any(getattr(it, name) for name in further):
        return False
    weights, experts = likeliest(it.scores_ptr, it.K, it.RENORMALIZE)
    it.out_weights_ptr.copy_(weights)
    it.out_indices_ptr.copy_(experts)
    return True


def ep_scatter(it: SimpleNamespace) -> bool:
    """Rows to behind those that their experts have; the interpreter fails, as at vLLM's sampler."""
    if it.IS_FP8:
        return False
    local = it.recv_topk - it.expert_start
    it.output_index.fill_(-1)
    for expert in range(it.num_experts):
        row, k = torch.nonzero(local == expert, as_tuple=True)
        place = torch.arange(len(row)) + int(it.expert_start_loc[expert])
        it.output_tensor[place] = it.recv_x[row]
        it.output_index[row, k] = place.to(it.output_index)
        it.expert_start_loc[expert] += len(row)
    return True


def ep_gather(it: SimpleNamespace) -> bool:
    """Weighted sums of what each row's experts gave."""
    meant = it.recv_topk_ids >= 0
    given = it.input_tensor[it.input_index.masked_fill(~meant, 0).long()].float()
    weighted = given.masked_fill(~meant[..., None], 0) * it.recv_topk_weight[..., None]
    it.output_tensor.copy_(weighted.sum(1).to(it.output_tensor.dtype))
    return True


# ---- operators of `sgl_kernel`


def rmsnorm(output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Also in float32, which the compiled one refuses."""
    rms_norm(output, input, weight, eps)


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """Also in float32, which the compiled one refuses."""
    fused_add_rms_norm(input, residual, weight, eps)


@in_stream
def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
) -> None:
    """Choices by expert, each filled up to whole blocks; -1, of other ranks, is an expert too."""
    order, of_blocks = in_blocks(topk_ids, range(-1, num_experts - 1), block_size)
    sorted_token_ids.fill_(topk_ids.numel())
    sorted_token_ids[: len(order)] = order.to(sorted_token_ids)
    experts_ids[: len(of_blocks)] = of_blocks.to(experts_ids)
    num_tokens_post_pad.fill_(len(order))


@in_stream
def moe_sum_reduce(input: torch.Tensor, output: torch.Tensor, routed_scaling_factor: float) -> None:
    """Of the choices of each token (T, K, H)."""
    output.copy_((input.float().sum(1) * routed_scaling_factor).to(output.dtype))


# ---- functions that SGLang compiles as it starts


@in_stream
def run_activation(input: torch.Tensor, out: torch.Tensor, kind: str) -> None:
    """Of a gate, and what it gates beside it."""
    if kind != "silu":
        raise NotImplementedError(f"the emulated GPU has no values for {kind}")
    silu_and_mul(out, input)


def run_activation_filtered(
    input: torch.Tensor, out: torch.Tensor, expert_ids: torch.Tensor, step: int, kind: str
) -> None:
    """As well of rows that nobody reads, which the compiled one leaves as they are."""
    run_activation(input, out, kind)


@in_stream
def qknorm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
) -> None:
    """In place, of each head (T, heads, head)."""
    rms_norm(q, q, q_weight, eps)
    rms_norm(k, k, k_weight, eps)


@in_stream
def run_rope(
    q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor
) -> None:
    """In place, of (T, heads, rotated) each."""
    rotary_embedding(positions, q, k, q.shape[-1], cos_sin_cache, True)


@in_stream
def run_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """In place; keys and values go to their slots too."""
    run_rope(q, k, cos_sin_cache, positions)
    store_cache(k.flatten(1), v.flatten(1), k_cache, v_cache, slots, len(k_cache), -1)


@in_stream
def store_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    size_limit: int,
    skipped: int,
) -> None:
    """Keys and values (T, row) go to their slots but for the one that is skipped."""
    meant = slots != skipped
    k_cache[slots[meant].long()] = k[meant]
    v_cache[slots[meant].long()] = v[meant]


@in_stream
def clamp_position(out: torch.Tensor, lengths: torch.Tensor) -> None:
    """Of the last token of each sequence."""
    out.copy_((lengths - 1).clamp(min=0))


@in_stream
def mask_topk_ids(topk_ids: torch.Tensor, number: torch.Tensor) -> None:
    """Tokens behind the first ``number`` choose nobody."""
    topk_ids[int(number) :] = -1


@in_stream
def per_token_group_quant(
    input: torch.Tensor, output_q: torch.Tensor, output_s: torch.Tensor
) -> None:
    """Groups of the tokens' values, each with a scale in float32."""
    if input.shape != output_q.shape or output_s.dtype != torch.float32:
        raise NotImplementedError("the emulated GPU has no values for activations or packed scales")
    info = torch.finfo if output_q.dtype.is_floating_point else torch.iinfo
    limits = info(output_q.dtype).min, info(output_q.dtype).max
    size = input.shape[-1] // output_s.shape[-1]
    by_group(input, output_q, output_s, size, LEAST_LARGEST, limits, False)


_LOOK_AT_NO_VALUES = ("weak_ref_tensor",)
_OPERATORS = {
    each.__name__: each
    for each in (rmsnorm, fused_add_rmsnorm, moe_align_block_size, moe_sum_reduce)
}
_MODULES: dict[str, dict[str, Callable[..., Any]]] = {  # by the beginnings of their names
    "activation": {
        "run_activation": run_activation,
        "run_activation_filtered": run_activation_filtered,
    },
    "dpsk_v4_mask_topk": {"run": mask_topk_ids},
    "clamp_position": {"clamp_position": clamp_position},
    "fused_rope_true": {"run_rope": run_rope, "run_rope_store": run_rope_store},  # of halves
    "per_token_group_quant": {"per_token_group_quant": per_token_group_quant},
    "qknorm": {"qknorm": qknorm},
    "kvcache": {"store_cache": store_cache},
}
