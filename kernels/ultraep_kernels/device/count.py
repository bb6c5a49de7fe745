"""count: topk_ids (T, K) logical -> load (E,), and how many of each expert precede a block of ids.

One launch: a histogram per block of ids, then for every expert a running sum over the blocks. The
sum ends in the load; its partial sums give ``reroute`` how many assignments of an expert precede a
block. Where the layer's row is wanted, the last program to arrive writes it; where it is to be
exchanged, further programs of the launch do that (``exchange``).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.device._decisions import is_off
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.exchange import (
    Inboxes,
    RowSizes,
    exchange_program,
    fill_row,
    row_sizes,
)
from ultraep_kernels.device.launch import launch

__all__ = [
    "BLOCK_IDS",
    "CountBuffers",
    "Counted",
    "blocks_of",
    "count",
    "ids_of",
    "new_count_buffers",
]

BLOCK_IDS = 128  # ids per program; reroute compares them pairwise
_BLOCK_COLUMNS = 8  # experts per program of the running sum
_BLOCK_ROWS = 128  # blocks per step of the running sum


class Counted(NamedTuple):
    """Loads and what ``reroute`` needs of the count."""

    load: torch.Tensor  # (E,) int32: assignments per logical expert
    unknown: torch.Tensor  # (1,) int32: ids that were neither an expert nor padding
    before: torch.Tensor  # (>= B, E + 1) int32: assignments of each expert in earlier blocks of ids
    row: torch.Tensor  # (W,) int32: of the exchange, where it was wanted


class CountBuffers(NamedTuple):
    """What a count writes to, for at most so many ids."""

    counted: Counted
    total: torch.Tensor  # (E + 1,) int32: load, then unknown
    turns: torch.Tensor  # (4,) int32, zero between launches

    def holding(self, num_ids: int) -> "CountBuffers":
        """The same for at most ``num_ids`` ids."""
        before = self.counted.before.new_empty((blocks_of(num_ids), self.total.numel()))
        return self._replace(counted=self.counted._replace(before=before))


class _Sizes(NamedTuple):
    """What the kernel is compiled for."""

    num_experts: int
    num_bins: int  # a power of two, at least E
    num_sums: int  # programs of the running sum
    block_experts: int
    has_load: bool  # whether a row has
    rows: RowSizes  # of the exchange
    block: int = BLOCK_IDS
    columns: int = _BLOCK_COLUMNS
    block_rows: int = _BLOCK_ROWS


@triton.jit
def _count_block(ids_ptr, before_ptr, num_ids, block, SIZES: tl.constexpr):
    NUM_EXPERTS: tl.constexpr = SIZES.num_experts
    offsets = block * SIZES.block + tl.arange(0, SIZES.block)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (ids >= 0) & (ids < NUM_EXPERTS)
    counts = tl.histogram(tl.where(valid, ids, 0).to(tl.int32), SIZES.num_bins, mask=valid)
    unknown = tl.sum(((ids != -1) & ~valid).to(tl.int32), axis=0)
    bins = tl.arange(0, SIZES.num_bins)
    row_ptr = before_ptr + block.to(tl.int64) * (NUM_EXPERTS + 1)
    tl.store(row_ptr + bins, counts, mask=bins < NUM_EXPERTS)
    tl.store(row_ptr + NUM_EXPERTS, unknown)


@triton.jit
def _add_up_columns(
    before_ptr,  # (B, E + 1) int32; in: per block, out: of the blocks before
    total_ptr,  # (E + 1,) int32
    program,
    num_blocks,
    SIZES: tl.constexpr,
):
    NUM_COLUMNS: tl.constexpr = SIZES.num_experts + 1
    columns = program * SIZES.columns + tl.arange(0, SIZES.columns)
    rows = tl.arange(0, SIZES.block_rows)
    total = tl.full((SIZES.columns,), 0, tl.int32)
    for first in range(0, num_blocks, SIZES.block_rows):
        mask = ((first + rows) < num_blocks)[:, None] & (columns < NUM_COLUMNS)[None, :]
        offsets = (first + rows).to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        counts = tl.load(before_ptr + offsets, mask=mask, other=0)
        before = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(before_ptr + offsets, before, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(total_ptr + columns, total, mask=columns < NUM_COLUMNS)


@triton.jit(
    do_not_specialize=["patience_ns", "begins", "num_ids"],
    do_not_specialize_on_alignment=["ids_ptr", "before_ptr"],  # an engine's; of any batch
)
def _count_kernel(
    total_ptr,  # (E + 1,) int32, out
    row_ptr,  # (W,) int32, out; not written without ``choice_ptr``
    turns_ptr,  # (4,) int32: turns; arrivals: blocks, columns, the row
    choice_ptr,  # (3,) int32: policy, speeds, time; or None
    decision_ptr,  # (1,) int32: of the layer before; or None
    inboxes,  # Inboxes, or None: without an exchange
    rows_ptr,  # (R, W) int32, out; None without an exchange
    patience_ns: tl.int64,
    begins,  # whether the layer is its batch's first
    ids_ptr,  # (N,) int32 or int64
    before_ptr,  # (B, E + 1) int32; the last column counts unknown ids
    num_ids,
    SIZES: tl.constexpr,
):
    if is_off(decision_ptr, begins):
        return
    turn = take_turn(turns_ptr)
    num_blocks = tl.maximum((num_ids + SIZES.block - 1) // SIZES.block, 1)
    is_last = turn < 0  # of the launch
    if turn < num_blocks:
        _count_block(ids_ptr, before_ptr, num_ids, turn, SIZES)
        arrive(turns_ptr + 1)
    elif turn < num_blocks + SIZES.num_sums:
        await_arrivals(turns_ptr + 1, num_blocks)
        _add_up_columns(before_ptr, total_ptr, turn - num_blocks, num_blocks, SIZES)
        if arrive(turns_ptr + 2) == SIZES.num_sums - 1:
            if choice_ptr is not None:
                fill_row(
                    total_ptr,
                    choice_ptr,
                    row_ptr,
                    SIZES.num_experts,
                    SIZES.has_load,
                    SIZES.block_experts,
                )
            if inboxes is not None:
                arrive(turns_ptr + 3)
            else:
                is_last = turn >= 0
    elif inboxes is not None:
        program = turn - num_blocks - SIZES.num_sums
        if program < SIZES.rows.num_ranks:
            await_arrivals(turns_ptr + 3, 1)
        is_last = exchange_program(program, row_ptr, inboxes, rows_ptr, patience_ns, SIZES.rows)
    if is_last:
        tl.store(turns_ptr + tl.arange(0, 4), tl.full((4,), 0, tl.int32))


def blocks_of(num_ids: int) -> int:
    """Programs that count so many ids, or look them up."""
    return max(1, -(-num_ids // BLOCK_IDS))


def ids_of(topk_ids: torch.Tensor, counted: Counted) -> dict[str, Any]:
    """What kernels are given of ids (T, K) that are counted: what is not the same in every batch.

    By themselves, not in a tuple: Triton makes a kernel anew for a number that is 1 or a multiple
    of 16, as for an address, wherever it stands in a tuple, and ids come in any number.
    """
    ids = topk_ids.contiguous()
    return {"ids_ptr": ids, "before_ptr": counted.before, "num_ids": ids.numel()}


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
    inboxes: Inboxes | None = None,
    rows: torch.Tensor | None = None,
    patience_ns: int = 0,
) -> Counted:
    """Load per logical expert; twin ``host.count.count``.

    Args:
        topk_ids: (T, K) int32 or int64 on the device, -1 is padding and never counts. T may be 0.
        num_logical_experts: E.
        choice: (3,) int32, ``contract.Choice`` of this rank; None where no row is wanted.
        has_load: as for ``new_count_buffers``, without buffers.
        buffers: to write to, for so many ids or more.
        decision: (1,) int32 of the layer before: where it says that the batch's policy is off,
            nothing is done, but in the layer with which the batch ``begins``.
        begins: whether this is that layer; the same on every rank.
        inboxes: through which the row is exchanged; None where it is not. Rows that did not arrive
            are garbage, and if a wait was given up before, the row is not pushed.
        rows: (R, W) int32, with ``inboxes``: where all ranks' rows are written to.
        patience_ns: nanoseconds after which a wait for a row is given up.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{topk_ids.dtype = } must be int32 or int64")
    own = buffers or new_count_buffers(
        topk_ids.numel(), num_logical_experts, topk_ids.device, has_load=has_load
    )
    power = 1 << (num_logical_experts - 1).bit_length()  # triton's own functions are slow
    width, num_ranks = own.counted.row.numel(), 0 if inboxes is None else inboxes.addresses.numel()
    assert inboxes is None or (choice is not None and rows is not None), "nothing to exchange"
    num_sums = -(-(num_logical_experts + 1) // _BLOCK_COLUMNS)
    sizes = _Sizes(
        num_experts=num_logical_experts,
        num_bins=power,
        num_sums=num_sums,
        block_experts=max(32, power),
        has_load=width > HEADER_WIDTH,
        rows=row_sizes(num_ranks, width),
    )
    launch(
        _count_kernel,
        (blocks_of(topk_ids.numel()) + num_sums + 2 * num_ranks,),
        own.total,
        own.counted.row,
        own.turns,
        choice,
        decision,
        inboxes,
        rows,
        patience_ns,
        int(begins),
        **ids_of(topk_ids, own.counted),
        SIZES=sizes,
        num_warps=4,
    )
    return own.counted
