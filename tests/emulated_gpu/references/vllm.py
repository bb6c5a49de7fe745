"""vLLM 0.33: its compiled operators in plain torch, and its Triton kernels that take too long.

Each does what vLLM's own says it does, with the same arguments. All other operators that vLLM has
compiled for CUDA raise when they are called.
"""

from types import SimpleNamespace
from typing import Any

import torch

from tests.emulated_gpu.operators.host import in_stream
from tests.emulated_gpu.operators.interpreter import REFERENCES
from tests.emulated_gpu.references import quantisation
from tests.emulated_gpu.references.attention import (
    flash_attention,
    store_in_pages,
    unified_attention,
)
from tests.emulated_gpu.references.contract import of_operator, of_signature, refusing
from tests.emulated_gpu.references.marlin import gptq_marlin_repack, moe_wna16_marlin_gemm

__all__ = ["compute_vllm"]

_libraries: list[torch.library.Library] = []  # registrations last as long as these


def compute_vllm() -> None:
    """Put references in the place of what vLLM has compiled, once in every process."""
    if _libraries:
        return
    import vllm._custom_ops
    import vllm.vllm_flash_attn  # noqa: F401
    from vllm.v1.attention.backends import triton_attn

    REFERENCES.update(fused_moe_kernel=fused_moe_kernel, _topk_topp_kernel=topk_topp_kernel)
    for name, function in (
        ("unified_attention", unified_attention),
        ("triton_reshape_and_cache_flash", in_stream(store_in_pages)),
    ):
        setattr(triton_attn, name, of_signature(getattr(triton_attn, name), function))
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for namespace, references in _OPERATORS.items():
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        for name in names:
            space, _, own = name.partition("::")
            if space != namespace or own in _LOOK_AT_NO_VALUES:
                continue
            function = refusing(name)
            if own in references:
                schema = torch._C._get_schema(name.partition(".")[0], name.partition(".")[2])
                function = of_operator(schema, references[own])
            library.impl(own, function, "CUDA")


# ---- Triton kernels


def fused_moe_kernel(it: SimpleNamespace) -> bool:
    """Rows of ``a`` (M, K) times their experts' (E, N, K), into ``c`` (M, top_k, N); by expert."""
    blocks = -(-int(it.num_tokens_post_padded_ptr) // it.BLOCK_SIZE_M)
    experts = it.expert_ids_ptr[:blocks].long()
    if it.naive_block_assignment:  # each row is a block of its own
        rows = torch.arange(blocks)
    else:
        rows = it.sorted_token_ids_ptr[: blocks * it.BLOCK_SIZE_M].long()
        experts = experts.repeat_interleave(it.BLOCK_SIZE_M)
    real = rows < it.num_valid_tokens
    rows, experts = rows[real], experts[real]
    out = it.c_ptr.as_strided((it.num_valid_tokens, it.N), (it.stride_cm, it.stride_cn))
    for expert in experts.unique().tolist():
        own = rows[experts == expert]
        if expert < 0:  # another rank's
            out[own] = 0
            continue
        a = _scaled(it.a_ptr[own // it.top_k], _rows_scales(it, own // it.top_k), it)
        b = _scaled(it.b_ptr[expert], _experts_scales(it, expert), it)
        product = a @ b.T
        if it.HAS_BIAS:
            product += it.b_bias_ptr[expert].float()
        if it.MUL_ROUTED_WEIGHT:
            product *= it.topk_weights_ptr.view(-1)[own, None].float()
        out[own] = product.to(out.dtype)
    return True


def _rows_scales(it: SimpleNamespace, rows: torch.Tensor) -> torch.Tensor | None:
    """Of activations: by block (rows, K / group_k), by row (rows, 1), or one."""
    scales = it.a_scale_ptr
    if scales is None or scales.numel() == 1:
        return scales
    return scales.view(len(it.a_ptr), -1)[rows]


def _experts_scales(it: SimpleNamespace, expert: int) -> torch.Tensor | None:
    """Of weights: by block (N / group_n, K / group_k), by channel (N, 1), or one."""
    if it.b_scale_ptr is None:
        return None
    scales = it.b_scale_ptr[expert]
    if it.group_n > 0 and it.group_k > 0:
        return scales.repeat_interleave(it.group_n, 0)[: it.N]
    return scales.view(-1, 1) if it.per_channel_quant or it.use_int8_w8a16 else scales


def _scaled(x: torch.Tensor, scales: torch.Tensor | None, it: SimpleNamespace) -> torch.Tensor:
    if scales is None:
        return x.float()
    if it.group_n > 0 and it.group_k > 0:
        scales = scales.repeat_interleave(it.group_k, 1)[:, : x.shape[1]]
    return x.float() * scales.float()


def topk_topp_kernel(it: SimpleNamespace) -> bool:
    """The likeliest tokens; the interpreter fails at a loop that calls methods of its counter."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    chosen = it.K if it.TOPK_ENABLED else None, it.P if it.TOPP_ENABLED else None
    rows = it.LOGITS[: it.BATCH_SIZE]
    rows.copy_(apply_top_k_top_p_pytorch(rows.clone(), *chosen))
    return True


# ---- operators of `_C`


@in_stream
def rms_norm(
    result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Over the last dimension."""
    wide = input.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    result.copy_(wide if weight is None else wide.to(input.dtype) * weight)


@in_stream
def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """In place: ``residual`` becomes the sum, and ``input`` its norm."""
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


@in_stream
def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    """Of a gate, and what it gates beside it."""
    gate, up = input.chunk(2, dim=-1)
    result.copy_((torch.nn.functional.silu(gate.float()) * up.float()).to(result.dtype))


@in_stream
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """In place, of the first dimensions of each head: halves of them, or neighbours."""
    rotated = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.view(-1)].float()[:, None].chunk(2, dim=-1)
    for x in (query, key):
        if x is None:
            continue
        heads = x.unflatten(-1, (-1, head_size)) if x.shape[-1] != head_size else x
        part = heads.view(len(cos), -1, head_size)[..., :rotated]
        of_pair = -2 if is_neox else -1
        pairs = part.float().unflatten(-1, (2, -1) if is_neox else (-1, 2))
        one, other = pairs.unbind(of_pair)
        turned = one * cos - other * sin, other * cos + one * sin
        part.copy_(torch.stack(turned, of_pair).flatten(-2))


@in_stream
def vocab_parallel_embedding(
    out: torch.Tensor,
    input_ids: torch.Tensor,
    weight: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> None:
    """This rank's rows of the vocabulary; zeros for tokens that are others'."""
    from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask

    added = added_vocab_start_index, added_vocab_end_index
    ranges = org_vocab_start_index, org_vocab_end_index, num_org_vocab_padding, *added
    own, away = get_masked_input_and_mask(input_ids.long(), *ranges)
    out.copy_(weight[own].masked_fill(away[:, None], 0))


# ---- operators of `_moe_C`


@in_stream
def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """The likeliest experts of each token; of two alike the lower number."""
    scores = gating_output.float().softmax(-1)
    chosen = scores if bias is None else scores + bias
    tokens, top_k = topk_indices.shape
    order = chosen.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, order)
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    if is_padding is not None:
        order = order.masked_fill(is_padding.bool()[:tokens, None], -1)
    topk_indices.copy_(order)
    numbers = torch.arange(tokens * top_k, device=order.device).view(top_k, tokens)
    token_expert_indices.copy_(numbers.T)


@in_stream
def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    maybe_expert_map: torch.Tensor | None,
) -> None:
    """Assignments by expert, each expert's padded to whole blocks; no other ranks' experts."""
    ids = topk_ids.view(-1).long().cpu()
    local = torch.arange(num_experts)
    if maybe_expert_map is not None:
        local = maybe_expert_map.long().cpu()[:num_experts]
    order, experts = [torch.empty(0, dtype=torch.long)], []
    for expert in torch.nonzero(local >= 0).view(-1).tolist():
        own = torch.nonzero(ids == expert).view(-1)
        blocks = -(-len(own) // block_size)
        padding = 0, blocks * block_size - len(own)
        order.append(torch.nn.functional.pad(own, padding, value=ids.numel()))
        experts += [int(local[expert])] * blocks
    joined = torch.cat(order)
    sorted_token_ids.fill_(ids.numel())
    sorted_token_ids[: len(joined)] = joined.to(sorted_token_ids)
    experts_ids.fill_(-1)
    experts_ids[: len(experts)] = torch.tensor(experts).to(experts_ids)
    num_tokens_post_pad.fill_(len(joined))


@in_stream
def moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    """Of the choices of each token (T, K, H), with ``topk_ids`` of those of this rank alone."""
    if topk_ids is not None:
        away = topk_ids < 0
        if expert_map is not None:
            away |= expert_map[topk_ids.clamp(min=0).long()] < 0
        input = input.masked_fill(away[..., None], 0)
    output.copy_(input.float().sum(1).to(output.dtype))


# ---- attention


def get_scheduler_metadata(**_: Any) -> torch.Tensor:
    """How FlashAttention divides its work: nothing here looks at it."""
    return torch.zeros(1, dtype=torch.int32, device="cuda")


_LOOK_AT_NO_VALUES = "weak_ref_tensor", "get_cuda_view_from_cpu_tensor"
_OPERATORS: dict[str, dict[str, Any]] = {
    "_C": {
        each.__name__: each
        for each in (
            *(rms_norm, fused_add_rms_norm, silu_and_mul),
            *(rotary_embedding, vocab_parallel_embedding),
            *(getattr(quantisation, name) for name in quantisation.__all__),
            gptq_marlin_repack,
        )
    },
    "_moe_C": {
        each.__name__: each
        for each in (topk_softmax, moe_align_block_size, moe_sum, moe_wna16_marlin_gemm)
    },
    "_C_cache_ops": {"reshape_and_cache_flash": in_stream(store_in_pages)},
    "_vllm_fa3_C": {"fwd": flash_attention, "get_scheduler_metadata": get_scheduler_metadata},
}
