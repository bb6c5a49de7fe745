"""count: topk_ids (T, K) logical -> load (E,), and how many of each expert precede a block of ids.

Two launches and no atomics: a histogram per block of ids, then for every expert a running sum over
the blocks. The sum ends in the load; its partial sums give ``reroute`` how many
assignments of an expert precede a block.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["BLOCK_IDS", "Counted", "count"]

BLOCK_IDS = 128  # ids per program; reroute compares them pairwise
_BLOCK_COLUMNS = 8  # experts per program of the running sum
_BLOCK_ROWS = 128  # blocks per step of the running sum


@dataclass(frozen=True)
class Counted:
    """Loads and what ``reroute`` needs of the count."""

    load: torch.Tensor  # (E,) int32: assignments per logical expert
    unknown: torch.Tensor  # (1,) int32: ids that were neither an expert nor padding
    before: torch.Tensor  # (B, E + 1) int32: assignments of each expert in earlier blocks of ids


@triton.jit
def _histogram_kernel(
    ids_ptr,  # (N,) int32 or int64
    counts_ptr,  # (B, E + 1) int32; the last column counts unknown ids
    num_ids,
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,  # a power of two, at least E
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (ids >= 0) & (ids < NUM_EXPERTS)
    counts = tl.histogram(tl.where(valid, ids, 0).to(tl.int32), NUM_BINS, mask=valid)
    unknown = tl.sum(((ids != -1) & ~valid).to(tl.int32), axis=0)
    bins = tl.arange(0, NUM_BINS)
    row_ptr = counts_ptr + block.to(tl.int64) * (NUM_EXPERTS + 1)
    tl.store(row_ptr + bins, counts, mask=bins < NUM_EXPERTS)
    tl.store(row_ptr + NUM_EXPERTS, unknown)


@triton.jit
def _running_sum_kernel(
    counts_ptr,  # (B, C) int32; in: per block, out: of the blocks before
    total_ptr,  # (C,) int32
    num_blocks,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.arange(0, BLOCK_ROWS)
    total = tl.zeros((BLOCK_COLUMNS,), tl.int32)
    for first in range(0, num_blocks, BLOCK_ROWS):
        mask = ((first + rows) < num_blocks)[:, None] & (columns < NUM_COLUMNS)[None, :]
        offsets = (first + rows).to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        counts = tl.load(counts_ptr + offsets, mask=mask, other=0)
        before = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(counts_ptr + offsets, before, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(total_ptr + columns, total, mask=columns < NUM_COLUMNS)


def count(topk_ids: torch.Tensor, num_logical_experts: int) -> Counted:
    """Load per logical expert; twin ``host.count.count``.

    ``topk_ids`` (T, K) int32 or int64 on the device, -1 is padding and never counts. T may be 0.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{topk_ids.dtype = } must be int32 or int64")
    ids = topk_ids.reshape(-1)
    num_blocks = max(1, triton.cdiv(ids.numel(), BLOCK_IDS))
    columns = num_logical_experts + 1
    before = torch.empty((num_blocks, columns), dtype=torch.int32, device=ids.device)
    total = torch.empty(columns, dtype=torch.int32, device=ids.device)
    _histogram_kernel[(num_blocks,)](
        ids,
        before,
        ids.numel(),
        NUM_EXPERTS=num_logical_experts,
        NUM_BINS=triton.next_power_of_2(num_logical_experts),
        BLOCK=BLOCK_IDS,
        num_warps=4,
    )
    _running_sum_kernel[(triton.cdiv(columns, _BLOCK_COLUMNS),)](
        before,
        total,
        num_blocks,
        NUM_COLUMNS=columns,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        BLOCK_ROWS=_BLOCK_ROWS,
        num_warps=4,
    )
    return Counted(total[:num_logical_experts], total[num_logical_experts:], before)
