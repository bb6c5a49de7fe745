"""vLLM 0.33: its compiled operators in plain torch, and its Triton kernels that take too long.

Each does what vLLM's own says it does, with the same arguments. All other operators that vLLM has
compiled for CUDA raise when they are called.
"""

from functools import cache
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
from tests.emulated_gpu.references.contract import of_signature, replace_operators
from tests.emulated_gpu.references.experts import batched_triton_kernel, fused_moe_kernel
from tests.emulated_gpu.references.flashinfer import cutlass_fused_moe, install_flashinfer
from tests.emulated_gpu.references.layers import (
    fused_add_rms_norm,
    in_blocks,
    likeliest,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from tests.emulated_gpu.references.marlin import (
    awq_marlin_repack,
    gptq_marlin_repack,
    moe_wna16_marlin_gemm,
)

__all__ = ["compute_vllm", "offer_dispatch"]


@cache  # plug-ins may be called again
def compute_vllm() -> None:
    """Put references in the place of what vLLM has compiled, once in every process."""
    import vllm._custom_ops
    import vllm.vllm_flash_attn  # noqa: F401
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.v1.attention.backends import triton_attn

    taken = [torch.float32, torch.bfloat16, torch.float16]  # by its Triton kernels
    config: Any = Fp8Config
    config.get_supported_act_dtypes = staticmethod(lambda: taken)

    REFERENCES.update(fused_moe_kernel=fused_moe_kernel, _topk_topp_kernel=topk_topp_kernel)
    REFERENCES.update(batched_triton_kernel=batched_triton_kernel)
    REFERENCES.update(_per_token_quant_int8=per_token_quant_int8)
    for name, function in (
        ("unified_attention", unified_attention),
        ("triton_reshape_and_cache_flash", in_stream(store_in_pages)),
    ):
        setattr(triton_attn, name, of_signature(getattr(triton_attn, name), function))
    for namespace, references in _OPERATORS.items():
        replace_operators(namespace, references, _LOOK_AT_NO_VALUES)


@cache
def offer_dispatch() -> None:
    """Have vLLM find what it needs of DeepEP and FlashInfer for its all-to-all, but no more."""
    from vllm.utils import flashinfer as library
    from vllm.utils import import_utils

    versions: Any = import_utils
    versions._get_runtime_nccl_version = lambda: import_utils.DEEPEP_V2_MIN_NCCL_VERSION_RAW
    library.has_flashinfer()  # remembered: all else of it is not there
    install_flashinfer()
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.experts import (
        flashinfer_cutlass_moe,
        flashinfer_moe_ep,
        fused_batched_moe,
    )
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_v2

    stages: Any = all2all_utils
    stages.DeepEPV2PrepareAndFinalize = deepep_v2.DeepEPV2PrepareAndFinalize
    managers: Any = all2all
    managers.has_flashinfer_nvlink_one_sided = lambda: True
    batched: Any = fused_batched_moe  # asks a stream, of which the kit's torch knows too little
    batched._is_capturing_or_compiling = torch.cuda.is_current_stream_capturing
    megakernel: Any = flashinfer_moe_ep
    megakernel.supports_current_device = lambda: True  # of another GPU than this one seems to be
    experts: Any = flashinfer_cutlass_moe
    experts.has_flashinfer_cutlass_fused_moe = lambda: True
    experts.flashinfer_cutlass_fused_moe = cutlass_fused_moe


# ---- Triton kernels


def topk_topp_kernel(it: SimpleNamespace) -> bool:
    """The likeliest tokens; the interpreter fails at a loop that calls methods of its counter."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    chosen = it.K if it.TOPK_ENABLED else None, it.P if it.TOPP_ENABLED else None
    rows = it.LOGITS[: it.BATCH_SIZE]
    rows.copy_(apply_top_k_top_p_pytorch(rows.clone(), *chosen))
    return True


def per_token_quant_int8(it: SimpleNamespace) -> bool:
    """Each row has a scale of its own; the interpreter takes minutes."""
    given = it.x_ptr, it.xq_ptr, it.scale_ptr
    quantisation.by_group(*given, size=it.N, least=1e-10, limits=(-127, 127), is_power_of_two=False)
    return True


# ---- operators of `_C`


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


@in_stream
def masked_moe_activation(
    out: torch.Tensor, input: torch.Tensor, valid_token_counts: torch.Tensor, activation: str
) -> None:
    """Of as many rows as each expert has, (E, T, N) from (E, T, 2 N); other rows stay.

    csrc/libtorch_stable/activation_kernels.cu of vLLM 0.33.
    """
    if activation != "silu":
        raise NotImplementedError(f"the emulated GPU has no values for {activation}")
    places = torch.arange(input.shape[-2], device=input.device)
    valid = places < valid_token_counts.view(*input.shape[:-2], 1)
    gate, up = input[valid].float().chunk(2, dim=-1)
    out[valid] = (torch.nn.functional.silu(gate) * up).to(out.dtype)


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
    """The likeliest experts of each token, with ``bias`` that changes no weight."""
    tokens, top_k = topk_indices.shape
    weights, order = likeliest(gating_output, top_k, renormalize, bias)
    topk_weights.copy_(weights)
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
    local = torch.arange(num_experts)
    if maybe_expert_map is not None:
        local = maybe_expert_map.long().cpu()[:num_experts]
    experts = torch.nonzero(local >= 0).view(-1).tolist()
    order, of_blocks = in_blocks(topk_ids, experts, block_size)
    sorted_token_ids.fill_(topk_ids.numel())
    sorted_token_ids[: len(order)] = order.to(sorted_token_ids)
    experts_ids.fill_(-1)
    experts_ids[: len(of_blocks)] = local[of_blocks].to(experts_ids)
    num_tokens_post_pad.fill_(len(order))


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
            *(rotary_embedding, vocab_parallel_embedding, masked_moe_activation),
            *(getattr(quantisation, name) for name in quantisation.__all__),
            *(awq_marlin_repack, gptq_marlin_repack),
        )
    },
    "_moe_C": {
        each.__name__: each
        for each in (topk_softmax, moe_align_block_size, moe_sum, moe_wna16_marlin_gemm)
    },
    "_C_cache_ops": {"reshape_and_cache_flash": in_stream(store_in_pages)},
    "_vllm_fa3_C": {"fwd": flash_attention, "get_scheduler_metadata": get_scheduler_metadata},
}
