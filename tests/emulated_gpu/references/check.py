"""References against what they stand for: the engines' Triton kernels, interpreted, and torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.emulated_gpu.operators.interpreter import REFERENCES
from tests.support.quantised import SCHEMES

__all__ = [
    *("check_attention", "check_sglangs_attention"),
    *("check_experts", "check_experts_in_8_bits", "check_marlin", "moe_layer"),
]

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PAGE, HEADS, KV_HEADS, HEAD = 16, 4, 2, 64
LENGTHS, QUERIES = (37, 5, 64), (37, 1, 20)  # a prefill, a decode, and a chunk
EXPERTS, TOKENS, HIDDEN, INNER, TOP_K = 4, 20, 64, 32, 2


def check_attention() -> dict[str, Any]:
    """FlashAttention 3 by its reference, vLLM's kernel by its reference and interpreted."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops import triton_unified_attention
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    errors = {}
    for dtype in LARGEST_ERROR:
        queries, keys, values = _sequences(dtype, QUERIES)
        expected = torch.cat([*map(_attention, queries, keys, values)])
        pages = torch.arange(1, 13, dtype=torch.int32, device="cuda").view(3, 4)
        caches = torch.zeros(2, 13, PAGE, KV_HEADS, HEAD, dtype=dtype, device="cuda").unbind()
        one = torch.ones(1, device="cuda")
        for number, length in enumerate(LENGTHS):
            place = torch.arange(length, device="cuda")
            slots = pages[number, place // PAGE].long() * PAGE + place % PAGE
            new = keys[number].cuda(), values[number].cuda()
            _custom_ops.reshape_and_cache_flash(*new, *caches, slots, "auto", one, one)
        starts = _bounds(QUERIES)
        q, lengths = torch.cat(queries).cuda(), torch.tensor(LENGTHS, dtype=torch.int32).cuda()
        most = {"max_seqlen_q": max(QUERIES), "max_seqlen_k": max(LENGTHS)}
        given = most | {"cu_seqlens_q": starts, "seqused_k": lengths, "block_table": pages}
        given |= {"causal": True, "softmax_scale": HEAD**-0.5, "window_size": [-1, -1]}
        flash = flash_attn_varlen_func(q, *caches, **given, fa_version=3)
        found = {"flash": flash}
        for name, module in (
            ("unified", triton_attn),
            ("unified, interpreted", triton_unified_attention),
        ):
            found[name] = torch.empty_like(q)
            none = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
            module.unified_attention(q, *caches, found[name], **given, softcap=0, **none)
        for name, out in found.items():
            errors[f"{name}, {dtype}"] = _error(out, expected, dtype)
    return {"largest_errors": errors}


def check_sglangs_attention() -> dict[str, Any]:
    """Both of its functions by their references and interpreted, with keys that lie about."""
    from sglang.kernels.ops.attention import decode_attention, extend_attention

    errors, scale, splits = {}, HEAD**-0.5, 4
    for dtype in LARGEST_ERROR:
        for name, sizes in (("extend", QUERIES), ("decode", (1, 1, 1))):
            queries, keys, values = _sequences(dtype, sizes)
            expected = torch.cat([*map(_attention, queries, keys, values)])
            new = sizes if name == "extend" else (0, 0, 0)
            kept = [length - number for length, number in zip(LENGTHS, new, strict=True)]
            slots = torch.randperm(sum(LENGTHS), generator=torch.Generator().manual_seed(5))
            slots = slots[: sum(kept)]
            buffers = torch.zeros(2, sum(LENGTHS), KV_HEADS, HEAD, dtype=dtype)
            for buffer, of_all in zip(buffers, (keys, values), strict=True):
                held = [x[:number] for x, number in zip(of_all, kept, strict=True)]
                buffer[slots] = torch.cat(held)
            q, starts = torch.cat(queries).cuda(), _bounds(sizes)
            cached = *buffers.cuda(), _bounds(kept), slots.cuda()
            for way in ("reference", "interpreted"):
                out = torch.empty_like(q)
                if name == "extend":
                    function = extend_attention.extend_attention_fwd
                    k, v = (
                        torch.cat([x[number:] for x, number in zip(each, kept, strict=True)]).cuda()
                        for each in (keys, values)
                    )
                    k_buffer, v_buffer, bounds, indices = cached
                    given = q, k, v, out, k_buffer, v_buffer, starts, bounds, indices
                    given += None, True, None, max(sizes), 1.0, 1.0, scale
                else:
                    function = decode_attention.decode_attention_fwd
                    parts = torch.zeros(len(sizes), HEADS, splits, HEAD, device="cuda")
                    number = torch.full((len(sizes),), splits, dtype=torch.int32, device="cuda")
                    k_buffer, v_buffer, bounds, indices = cached
                    given = (
                        q,
                        k_buffer,
                        v_buffer,
                        out,
                        bounds,
                        indices,
                        parts,
                        parts[..., 0].clone(),
                    )
                    given += number, splits, scale, 1.0, 1.0
                if way == "interpreted":
                    function = function.__wrapped__
                function(*given)
                errors[f"{name}, {way}, {dtype}"] = _error(out, expected, dtype)
    return {"largest_errors": errors}


def _sequences(dtype: torch.dtype, sizes: Sequence[int]) -> tuple[list[torch.Tensor], ...]:
    """Queries, of which there are ``sizes``, keys and values of each sequence."""
    heads = (sizes, HEADS, 2000), (LENGTHS, KV_HEADS, 1), (LENGTHS, KV_HEADS, 1000)
    queries, keys, values = (
        [_random(n, count, HEAD, dtype=dtype, seed=seed + n) for n in numbers]
        for numbers, count, seed in heads
    )
    return queries, keys, values


def _bounds(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).int().cuda()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(Q, heads, head) float32 of one sequence, whose last query is at its last key."""
    k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
    seen = torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(q))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q.float().transpose(0, 1), k, v, seen).transpose(0, 1)


def check_experts() -> dict[str, Any]:
    """vLLM's expert kernel by its reference and interpreted, of which one rank has half."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    errors = {}
    expert_map = torch.tensor([0, 1, -1, -1], dtype=torch.int32, device="cuda")
    for dtype in LARGEST_ERROR:
        x, weights, ids = _tokens(HIDDEN, dtype)
        gate_up = _random(EXPERTS // 2, 2 * INNER, HIDDEN, dtype=dtype, seed=2)
        down = _random(EXPERTS // 2, HIDDEN, INNER, dtype=dtype, seed=3)
        expected = moe_layer(x, weights, ids, gate_up, down)
        arguments = [each.cuda() for each in (x, gate_up, down, weights, ids.int())]
        given = {"expert_map": expert_map, "global_num_experts": EXPERTS}
        errors[f"reference, {dtype}"] = _error(fused_experts(*arguments, **given), expected, dtype)
        reference = REFERENCES.pop("fused_moe_kernel")
        try:
            found = fused_experts(*arguments, **given)
        finally:
            REFERENCES["fused_moe_kernel"] = reference
        errors[f"interpreted, {dtype}"] = _error(found, expected, dtype)
    return {"largest_errors": errors}


def check_experts_in_8_bits() -> dict[str, Any]:
    """A layer of vLLM's against one of dequantised experts, whose inputs are rounded alike.

    ``unrounded`` is how far the latter is from one whose inputs are as they were.
    """
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    errors, unrounded, size = {}, {}, 256
    x, weights, ids = _tokens(size, torch.float32)
    by_row = {"a1_scale": None, "a2_scale": None, "per_act_token_quant": True}
    for name, described, settings in (
        ("fp8", config.fp8_w8a8_moe_quant_config, {"block_shape": [128, 128]}),
        ("fp8-tensor", config.fp8_w8a8_moe_quant_config, {}),
        ("int8", config.int8_w8a8_moe_quant_config, by_row),
    ):
        scheme, plain, codes, scales = SCHEMES[name], [], [], []
        for rows in (2 * size, size):
            drawn = _random(EXPERTS, rows, size, dtype=torch.float32, seed=rows) / size**0.5
            written = [scheme.write(matrix, matrix.abs().max()) for matrix in drawn]
            plain.append(torch.stack([scheme.read(each) for each in written]))
            for kept, number in ((codes, 0), (scales, 1)):
                kept.append(torch.stack([[*each.values()][number] for each in written]).cuda())
        if name == "fp8-tensor":
            one = written[0]["input_scale"].cuda()
            settings = {"a1_scale": one, "a2_scale": one}
        quantised = described(w1_scale=scales[0], w2_scale=scales[1], **settings)
        arguments = x.cuda(), *codes, weights.cuda(), ids.int().cuda()
        expected = moe_layer(x, weights, ids, *plain, scheme.rounded)
        found = fused_experts(*arguments, quant_config=quantised)
        errors[name] = _error(found, expected, torch.bfloat16)  # some may be rounded otherwise
        exact = moe_layer(x, weights, ids, *plain)
        unrounded[name] = float((exact - expected).norm() / exact.norm())
    return {"largest_errors": errors, "unrounded": unrounded}


def _tokens(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of a layer: inputs, weights and ids."""
    scores = _random(TOKENS, EXPERTS, dtype=torch.float32, seed=4).softmax(-1)
    return _random(TOKENS, size, dtype=dtype, seed=1), *scores.topk(TOP_K)


def moe_layer(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float,
) -> torch.Tensor:
    """Sums (T, H) float32 of those experts that there are (E, 2 I, H) and (E, H, I).

    What lies between their matrices is of the type of ``x``.
    """
    inputs, between = rounded(x.float()), x.new_zeros(*ids.shape, down.shape[2])
    chosen = [torch.nonzero(ids == expert, as_tuple=True) for expert in range(len(down))]
    for matrix, (token, k) in zip(gate_up, chosen, strict=True):
        gate, up = (inputs[token] @ matrix.float().T).to(x.dtype).float().chunk(2, dim=-1)
        between[token, k] = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    inputs = rounded(between.float().flatten(0, 1)).view(between.shape)
    total = torch.zeros(x.shape)
    for matrix, place in zip(down, chosen, strict=True):
        total.index_add_(0, place[0], inputs[place] @ matrix.float().T * weights[place][:, None])
    return total


def check_marlin() -> dict[str, Any]:
    """Products with weights in 4 bits that vLLM's own functions prepare, against dequantised ones.

    Codes and scales are drawn, so nothing is rounded but the result.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_zero_points
    from vllm.scalar_type import scalar_types

    size_k, size_n, errors, dtype = 256, 128, {}, torch.bfloat16
    x = _random(TOKENS, size_k, dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (size_k, size_n), generator=generator)
    zeros = torch.randint(0, 16, (2, size_n), generator=generator)
    packed = torch.stack([codes[n::8].int() << 4 * n for n in range(8)]).sum(0).int()
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    fp4 = torch.cat([fp4, -fp4])[codes]
    weight = _custom_ops.gptq_marlin_repack(packed.cuda(), size_k, size_n, 4)
    ids = torch.zeros(TOKENS, 1, dtype=torch.int32, device="cuda")
    sizes = {"size_m": TOKENS, "size_n": size_n, "size_k": size_k, "top_k": 1, "moe_block_size": 8}
    call = dict.fromkeys(("mul_topk_weights", "use_atomic_add", "is_zp_float"), False)
    for name, group, kind, plain in (
        ("int4", 128, scalar_types.uint4b8, codes.float() - 8),
        ("awq", 128, scalar_types.uint4, codes.float() - zeros.repeat_interleave(128, 0)),
        ("mxfp4", 32, scalar_types.float4_e2m1f, fp4),
        ("nvfp4", 16, scalar_types.float4_e2m1f, fp4),
    ):
        powers = torch.randint(-3, 3, (size_k // group, size_n), generator=generator)
        scales = 2.0**powers * (1 if name == "mxfp4" else 1.5)
        prepared, whole, factor = _marlin_scales(name, scales.to(dtype), size_k)
        of_zeros = marlin_zero_points(zeros, 2, size_n, 4)[None].cuda()
        found = _custom_ops.moe_wna16_marlin_gemm(
            x.cuda(),
            None,
            weight[None],
            None,
            prepared[None].cuda(),
            None,
            whole,
            of_zeros if name == "awq" else None,
            torch.zeros(1, dtype=torch.int32, device="cuda"),
            *moe_align_block_size(ids, 8, 1),
            torch.ones(TOKENS, 1, device="cuda"),
            b_q_type=kind,
            use_fp32_reduce=True,
            **sizes,
            **call,
        )
        expected = x.float() @ (plain * scales.repeat_interleave(group, 0) * factor)
        errors[name] = _error(found, expected, dtype)
    return {"largest_errors": errors}


def _marlin_scales(
    name: str, scales: torch.Tensor, size_k: int
) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """Scales (G, N) as the kernel takes them, those of NVFP4 with one of all; what that says."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

    groups, size_n = scales.shape
    prepared = marlin_utils.marlin_permute_scales(scales, size_k, size_n, size_k // groups)
    if name == "mxfp4":
        return marlin_utils_fp4.mxfp4_marlin_process_scales(prepared), None, 1
    if name != "nvfp4":
        return prepared, None, 1
    prepared, factor = marlin_utils_fp4.nvfp4_marlin_process_scales(prepared, None, scales.dtype)
    whole = torch.tensor([0.25], dtype=scales.dtype)
    given = marlin_utils_fp4.nvfp4_marlin_process_global_scale(whole) / factor
    return prepared, given.cuda(), 0.25


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _error(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Relative to the largest value. Raises RuntimeError where it is too large."""
    error = float((found.cpu().float() - expected).abs().max() / expected.abs().max())
    if not error <= LARGEST_ERROR[dtype]:
        raise RuntimeError(f"an error of {error:.1e} in {dtype}")
    return error
