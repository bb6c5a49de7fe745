"""vLLM's Marlin kernels for experts: weights in 4 or 8 bits, activations as they are.

What a weight looks like between the operators is their own affair: here it stays as GPTQ packs it.
Scales and zero points come as vLLM prepares them for the kernel, in the order of its own functions,
which are asked for that order. Products are of dequantised weights, in float32. Operators are those
that csrc/libtorch_stable/torch_bindings.cpp and moe/torch_bindings.cpp there declare (vLLM 0.33).
"""

from collections.abc import Callable, Sequence

import torch

from tests.emulated_gpu.operators.host import in_stream

__all__ = ["awq_marlin_repack", "gptq_marlin_repack", "moe_wna16_marlin_gemm"]

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ = 0, 4, 1, 5, 2, 6, 3, 7  # where in a word each of eight columns is
_BIAS_OF_FP8, _BIAS_OF_FP4 = 7, 1  # of exponents


def gptq_marlin_repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int
) -> torch.Tensor:
    """(K / 16, N * bits / 2) int32, of rows (K * bits / 32, N)."""
    return b_q_weight.reshape(size_k // 16, size_n * num_bits // 2).clone()


def awq_marlin_repack(
    b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int
) -> torch.Tensor:
    """The same, of rows (K, N * bits / 32), whose words are of columns in AWQ's order."""
    if num_bits != 4:
        raise NotImplementedError(f"the emulated GPU has no values for AWQ of {num_bits} bits")
    codes = _columns(b_q_weight, _AWQ).view(-1, 8, size_n)
    words = torch.stack([codes[:, n] << 4 * n for n in range(8)]).sum(0).int()
    return gptq_marlin_repack(words, size_k, size_n, num_bits)


def moe_wna16_marlin_gemm(
    a: torch.Tensor,
    c_or_none: torch.Tensor | None,
    b_q_weight: torch.Tensor,
    b_scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    b_zeros_or_none: torch.Tensor | None,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_past_padded: torch.Tensor,
    topk_weights: torch.Tensor,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    b_type_id: int,
    size_m: int,
    size_n: int,
    size_k: int,
) -> torch.Tensor:
    """Rows of ``a`` (M, K) times their experts', into (M * top_k, N)."""
    shape = size_m * top_k, size_n
    out = torch.empty(shape, dtype=a.dtype, device=a.device) if c_or_none is None else c_or_none

    @in_stream
    def multiply() -> None:
        blocks = int(num_tokens_past_padded) // moe_block_size
        rows = sorted_token_ids[: blocks * moe_block_size].long()
        experts = expert_ids[:blocks].long().repeat_interleave(moe_block_size)
        real = (rows < size_m * top_k) & (experts >= 0)
        rows, experts = rows[real], experts[real]
        for expert in experts.unique().tolist():
            own = rows[experts == expert]
            weight = _weight(b_q_weight[expert], size_k, size_n, b_type_id)
            if b_zeros_or_none is not None:
                zeros = _zeros(b_zeros_or_none[expert])
                weight = weight - zeros.repeat_interleave(size_k // len(zeros), 0)
            weight = weight * _scales(b_scales[expert], size_k, size_n, b_type_id)
            if global_scale is not None:  # for NVFP4, with the bias of what the weight becomes
                of_result = 127 if a.dtype == torch.bfloat16 else 15
                weight = (
                    weight * global_scale[expert].float() * 2.0 ** (7 - (of_result - _BIAS_OF_FP4))
                )
            product = a[own // top_k].float() @ weight
            if mul_topk_weights:
                product *= topk_weights.view(-1)[own, None].float()
            out.view(shape)[own] = product.to(out.dtype)

    multiply()
    return out


def _weight(packed: torch.Tensor, size_k: int, size_n: int, type_id: int) -> torch.Tensor:
    """(K, N) float32, without scales."""
    from vllm.scalar_type import ScalarType, scalar_types

    kind = ScalarType.from_id(type_id)
    bits = kind.size_bits
    shifts = torch.arange(0, 32, bits, device=packed.device)[None, :, None]
    words = packed.view(-1, 1, size_n).long()
    codes = ((words >> shifts) & (2**bits - 1)).view(size_k, size_n)
    decode: dict[ScalarType, Callable[[torch.Tensor], torch.Tensor]] = {
        scalar_types.uint4: torch.Tensor.float,
        scalar_types.uint4b8: lambda x: x.float() - 8,
        scalar_types.uint8b128: lambda x: x.float() - 128,
        scalar_types.float8_e4m3fn: lambda x: x.byte().view(torch.float8_e4m3fn).float(),
        scalar_types.float4_e2m1f: _fp4,
    }
    if kind not in decode:
        raise NotImplementedError(f"the emulated GPU has no values for Marlin's {kind}")
    return decode[kind](codes)


def _zeros(prepared: torch.Tensor) -> torch.Tensor:
    """(G, N) of groups (G, N / 8) int32 in the kernel's order."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms

    order, _ = get_scale_perms()
    codes = _columns(prepared, _AWQ)
    return codes.view(-1, len(order))[:, torch.tensor(order).argsort()].view(codes.shape)


def _columns(words: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Codes (R, N) of 4 bits of words (R, N / 8), each at its place of eight."""
    shifts = 4 * torch.tensor(places, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1)


def _fp4(codes: torch.Tensor) -> torch.Tensor:
    magnitude = torch.tensor(_FP4, device=codes.device)[codes & 7]
    return torch.where(codes >= 8, -magnitude, magnitude)


def _scales(prepared: torch.Tensor, size_k: int, size_n: int, type_id: int) -> torch.Tensor:
    """(K, N) float32, or (1, N), of groups (G, N) in the kernel's order."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
    from vllm.scalar_type import ScalarType, scalar_types

    kind, groups = ScalarType.from_id(type_id), prepared.shape[0]
    scales = prepared.float()
    if kind == scalar_types.float4_e2m1f:
        if prepared.dtype == torch.float8_e4m3fn:  # the upper byte of a half, without its sign
            bits = prepared.view(torch.uint8).int() << 7
            scales = bits.short().view(torch.float16).float() / 2**7
        scales = scales.view(-1, 4)[:, [0, 2, 1, 3]].view(groups, size_n)
    if kind == scalar_types.float8_e4m3fn:
        of_result = 127 if prepared.dtype == torch.bfloat16 else 15
        scales = scales * 2.0 ** (_BIAS_OF_FP8 - of_result)
    numbers = torch.arange(groups * size_n).view(groups, size_n)
    order = marlin_permute_scales(numbers, size_k, size_n, size_k // groups)
    ordered = torch.empty(groups * size_n, device=scales.device)
    ordered[order.view(-1).to(scales.device)] = scales.reshape(-1)
    ordered = ordered.view(groups, size_n)
    return ordered if groups == 1 else ordered.repeat_interleave(size_k // groups, 0)
