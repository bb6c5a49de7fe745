"""count: topk_ids (T, K) logical -> load (E,), and how many of each expert precede a block of ids.

One launch: a histogram per block of ids, then for every expert a running sum over the blocks. The
sum ends in the load; its partial sums give ``reroute`` how many assignments of an expert precede a
block. Where the layer's row is wanted, the last program to arrive writes it.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.device._decisions import is_off
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.exchange import fill_row
from ultraep_kernels.device.launch import launch

__all__ = ["BLOCK_IDS", "CountBuffers", "Counted", "blocks_of", "count", "new_count_buffers"]

BLOCK_IDS = 128  # ids per program; reroute compares them pairwise
_BLOCK_COLUMNS = 8  # experts per program of the running sum
_BLOCK_ROWS = 128  # blocks per step of the running sum


@dataclass(frozen=True)
class Counted:
    """Loads and what ``reroute`` needs of the count."""

    load: torch.Tensor  # (E,) int32: assignments per logical expert
    unknown: torch.Tensor  # (1,) int32: ids that were neither an expert nor padding
    before: torch.Tensor  # (>= B, E + 1) int32: assignments of each expert in earlier blocks of ids
    row: torch.Tensor  # (W,) int32: of the exchange, where it was wanted


@dataclass(frozen=True)
class CountBuffers:
    """What a count writes to, for at most so many ids."""

    counted: Counted
    total: torch.Tensor  # (E + 1,) int32: load, then unknown
    turns: torch.Tensor  # (4,) int32, zero between launches

    def holding(self, num_ids: int) -> "CountBuffers":
        """The same for at most ``num_ids`` ids."""
        before = self.counted.before.new_empty((blocks_of(num_ids), self.total.numel()))
        return replace(self, counted=replace(self.counted, before=before))


@triton.jit
def _count_block(
    ids_ptr,
    counts_ptr,
    block,
    num_ids,
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
def _add_up_columns(
    counts_ptr,  # (B, C) int32; in: per block, out: of the blocks before
    total_ptr,  # (C,) int32
    first_column,
    num_blocks,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
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


@triton.jit(
    do_not_specialize=["num_ids", "num_blocks", "begins"],
    do_not_specialize_on_alignment=["ids_ptr"],
)
def _count_kernel(
    ids_ptr,  # (N,) int32 or int64
    counts_ptr,  # (B, E + 1) int32; the last column counts unknown ids
    total_ptr,  # (E + 1,) int32
    row_ptr,  # (W,) int32, out; not written without HAS_ROW
    choice_ptr,  # (4,) int32: policy, threshold, speeds, time
    decision_ptr,  # (1,) int32: of the layer before; not read without HAS_DECISION
    turns_ptr,  # (4,) int32: turns, blocks and columns that have arrived
    num_ids,
    num_blocks,
    begins,  # whether the layer is its batch's first
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,  # a power of two, at least E
    BLOCK: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    NUM_SUMS: tl.constexpr,  # programs of the running sum
    HAS_ROW: tl.constexpr,
    HAS_LOAD: tl.constexpr,
    HAS_DECISION: tl.constexpr,
):
    if is_off(decision_ptr, begins, HAS_DECISION):
        return
    turn = take_turn(turns_ptr)
    if turn < num_blocks:
        _count_block(ids_ptr, counts_ptr, turn, num_ids, NUM_EXPERTS, NUM_BINS, BLOCK)
        arrive(turns_ptr + 1)
    else:
        await_arrivals(turns_ptr + 1, num_blocks)
        first_column = (turn - num_blocks) * BLOCK_COLUMNS
        _add_up_columns(
            counts_ptr,
            total_ptr,
            first_column,
            num_blocks,
            NUM_EXPERTS + 1,
            BLOCK_COLUMNS,
            BLOCK_ROWS,
        )
        if arrive(turns_ptr + 2) == NUM_SUMS - 1:
            tl.store(turns_ptr + tl.arange(0, 4), tl.zeros((4,), tl.int32))
            if HAS_ROW:
                fill_row(total_ptr, choice_ptr, row_ptr, NUM_EXPERTS, HAS_LOAD, BLOCK_EXPERTS)


def blocks_of(num_ids: int) -> int:
    """Programs that count so many ids, or look them up."""
    return max(1, -(-num_ids // BLOCK_IDS))


def new_count_buffers(
    num_ids: int,
    num_logical_experts: int,
    device: torch.device | str,
    total: torch.Tensor | None = None,
    *,
    has_load: bool = True,
) -> CountBuffers:
    """For counts of at most ``num_ids`` ids; ``total`` (E + 1,) int32 where it is to lie.

    ``has_load``: whether the load follows the header of a row; else it has its checksum.
    """
    if total is None:
        total = torch.empty(num_logical_experts + 1, dtype=torch.int32, device=device)
    width = HEADER_WIDTH + (num_logical_experts if has_load else 0)
    counted = Counted(
        load=total[:num_logical_experts],
        unknown=total[num_logical_experts:],
        before=torch.empty((0, total.numel()), dtype=torch.int32, device=device),
        row=torch.empty(width, dtype=torch.int32, device=device),
    )
    turns = torch.zeros(4, dtype=torch.int32, device=device)
    return CountBuffers(counted, total, turns).holding(num_ids)


def count(
    topk_ids: torch.Tensor,
    num_logical_experts: int,
    *,
    choice: torch.Tensor | None = None,
    has_load: bool = True,
    buffers: CountBuffers | None = None,
    decision: torch.Tensor | None = None,
    begins: bool = True,
) -> Counted:
    """Load per logical expert; twin ``host.count.count``, of the row ``exchange.row_reference``.

    Args:
        topk_ids: (T, K) int32 or int64 on the device, -1 is padding and never counts. T may be 0.
        num_logical_experts: E.
        choice: (4,) int32, ``contract.Choice`` of this rank; None where no row is wanted.
        has_load: as for ``new_count_buffers``, without buffers.
        buffers: to write to, for so many ids or more.
        decision: (1,) int32 of the layer before: where it says that the batch's policy is off,
            nothing is done, but in the layer with which the batch ``begins``.
        begins: whether this is that layer.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{topk_ids.dtype = } must be int32 or int64")
    ids = topk_ids.reshape(-1)
    num_blocks = blocks_of(ids.numel())
    own = buffers or new_count_buffers(
        ids.numel(), num_logical_experts, ids.device, has_load=has_load
    )
    num_sums = -(-(num_logical_experts + 1) // _BLOCK_COLUMNS)
    power = 1 << (num_logical_experts - 1).bit_length()  # triton's own functions are slow
    launch(
        _count_kernel,
        (num_blocks + num_sums,),
        ids,
        own.counted.before,
        own.total,
        own.counted.row,
        own.turns if choice is None else choice,
        own.turns if decision is None else decision,
        own.turns,
        ids.numel(),
        num_blocks,
        int(begins),
        NUM_EXPERTS=num_logical_experts,
        NUM_BINS=power,
        BLOCK=BLOCK_IDS,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_EXPERTS=max(32, power),
        NUM_SUMS=num_sums,
        HAS_ROW=choice is not None,
        HAS_LOAD=own.counted.row.numel() > HEADER_WIDTH,
        HAS_DECISION=decision is not None,
        num_warps=4,
    )
    return own.counted
