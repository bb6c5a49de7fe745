"""Attention over kept keys and values, by the contracts of FlashAttention 3 and both engines."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from tests.emulated_gpu.operators.host import in_stream

__all__ = [
    "decode_attention",
    "extend_attention",
    "flash_attention",
    "store_in_pages",
    "unified_attention",
]


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Q, heads, head) and sums (heads, Q) of one sequence, in float32.

    ``keys`` and ``values`` are (K, heads, head); the last query is at the last key.
    """
    share = queries.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(share, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), k) * scale
    if causal:
        rows = torch.arange(len(k) - len(queries), len(k), device=queries.device)
        later = torch.arange(len(k), device=queries.device)[None] > rows[:, None]
        scores.masked_fill_(later, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@in_stream
def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    causal: bool,
) -> None:
    """``out`` (Q, heads, head) and ``log_sums`` (heads, Q), in float32.

    ``keys`` and ``values`` are (pages, page, heads, head). Sequence n has the queries from
    ``starts[n]`` to ``starts[n + 1]``, ``lengths[n]`` keys in ``pages[n]``, and its last query at
    its last key.
    """
    bounds = starts.tolist()
    for number, length in enumerate(lengths.tolist()):
        first, end = bounds[number : number + 2]
        if end == first or not length:
            continue
        places = pages[number, : -(-length // keys.shape[1])].long()
        held = [x[places].flatten(0, 1)[:length] for x in (keys, values)]
        out[first:end], log_sums[:, first:end] = _attend(queries[first:end], *held, scale, causal)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    is_causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    cp_world_size: int = 1,
) -> Sequence[torch.Tensor]:
    """FlashAttention 3's ``fwd``: the output, its sums, and two that nobody asked for."""
    _require_no_window((window_size_left, window_size_right))
    if cp_world_size != 1:
        raise NotImplementedError("the emulated GPU has no values for keys on other ranks")
    out = torch.empty_like(q) if out is None else out
    log_sums = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    given = cu_seqlens_q, seqused_k, page_table, softmax_scale, is_causal
    attend(q, k, v, out, log_sums, *given)
    none = torch.empty(0, dtype=torch.float32, device=q.device)
    return out, log_sums, none, none


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: Sequence[int],
    block_table: torch.Tensor,
) -> None:
    """vLLM's own, of Triton kernels that take minutes in the interpreter."""
    _require_no_window(window_size)
    log_sums = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
    given = cu_seqlens_q, seqused_k, block_table, softmax_scale, causal
    attend(q, k, v, out, log_sums, *given)


@in_stream
def extend_attention(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    is_causal: bool,
    sm_scale: float,
) -> None:
    """SGLang's, of new tokens behind those kept. A buffer is (slots, heads, head)."""
    bounds = zip(pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=False)
    for (first, end), (first_kept, end_kept) in bounds:
        slots = kv_indices[first_kept:end_kept].long()
        k = torch.cat([k_buffer[slots], k_extend[first:end]])
        v = torch.cat([v_buffer[slots], v_extend[first:end]])
        o_extend[first:end], _ = _attend(q_extend[first:end], k, v, sm_scale, is_causal)


@in_stream
def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> None:
    """SGLang's, of a query for each sequence, whose own key is in the buffer already."""
    for row, (first, end) in zip(range(len(q)), pairwise(kv_indptr.tolist()), strict=False):
        slots = kv_indices[first:end].long()
        o[row], _ = _attend(q[row : row + 1], k_buffer[slots], v_buffer[slots], sm_scale, True)


def store_in_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
) -> None:
    """Keys and values (T, heads, head) go to their slots in (pages, page, heads, head)."""
    if kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise NotImplementedError(f"the emulated GPU has no values for a cache of {kv_cache_dtype}")
    slots = slot_mapping.long()
    rows = torch.nonzero(slots >= 0).view(-1)
    page = key_cache.shape[1]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[slots[rows] // page, slots[rows] % page] = new[rows].to(cache.dtype)


def _require_no_window(sides: Sequence[Any]) -> None:
    if any(side != -1 for side in sides):
        raise NotImplementedError(f"the emulated GPU has no values for a window of {sides}")
