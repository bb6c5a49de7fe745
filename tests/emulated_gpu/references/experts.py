"""The Triton kernels of engines' experts, by their contracts; the interpreter takes minutes."""

from types import SimpleNamespace

import torch

__all__ = ["batched_triton_kernel", "fused_moe_kernel"]

# what SGLang's kernel may do beside; the interpreter has it
_BEYOND = "c_sorted", "FUSE_SWIGLU", "FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SUM_ALL_REDUCE"


def fused_moe_kernel(it: SimpleNamespace) -> bool:
    """Rows of ``a`` (M, K) times their experts' (E, N, K), into ``c`` (M, top_k, N); by expert.

    The two kernels have the same name, and most of their arguments have.
    """
    given = vars(it)
    if any(given.get(name) for name in _BEYOND):
        return False
    has_bias = given.get("HAS_BIAS", True)
    bias = given.get("bias_ptr", given.get("b_bias_ptr")) if has_bias else None
    blocks = -(-int(it.num_tokens_post_padded_ptr) // it.BLOCK_SIZE_M)
    experts = it.expert_ids_ptr[:blocks].long()
    if given.get("naive_block_assignment"):  # each row is a block of its own
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
        if bias is not None:
            product += bias[expert].float()
        if it.MUL_ROUTED_WEIGHT:
            product *= it.topk_weights_ptr.view(-1)[own, None].float()
        out[own] = product.to(out.dtype)
    return True


def batched_triton_kernel(it: SimpleNamespace) -> bool:
    """vLLM's, of rows that are by expert: ``a`` (E, T, K) times ``b`` (E, K, N), into ``c``."""
    if it.use_fp8_w8a8 or it.use_int8_w8a16:
        return False
    sizes = it.max_num_tokens, it.K, it.N
    for expert, tokens in enumerate(it.expert_num_tokens.tolist()):
        a = it.a_ptr[expert].as_strided((tokens, sizes[1]), (it.stride_am, it.stride_ak))
        b = it.b_ptr[expert].as_strided(sizes[1:], (it.stride_bk, it.stride_bn))
        c = it.c_ptr[expert].as_strided((tokens, sizes[2]), (it.stride_cm, it.stride_cn))
        c.copy_(a.float() @ b.float())
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
