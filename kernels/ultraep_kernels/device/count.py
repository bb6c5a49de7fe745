"""count: topk_ids (T, K) logical -> load (E,), and how many of each expert precede a block of ids.

One launch: a histogram per block of ids, then for every expert a running sum over the blocks. The
sum ends in the load; its partial sums give ``reroute`` how many assignments of an expert precede a
block. Where the layer's row is wanted, the last program to arrive writes it; where it is to be
exchanged, further programs of the launch do that (``exchange``).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.device._decisions import is_off
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.exchange import Inboxes, exchange_program, fill_row, row_block
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

    def changed_by(self, topk_ids: torch.Tensor, num_ranks: int) -> dict[str, Any]:
        """What ``Launches`` of a count take anew for other ids; R of the exchange, 0: none."""
        ids = topk_ids.reshape(-1)
        num_blocks = blocks_of(ids.numel())
        return {
            "grid": (num_blocks + _num_sums(self.total.numel()) + 2 * num_ranks,),
            "ids_ptr": ids,
            "counts_ptr": self.counted.before,
            "num_ids": ids.numel(),
            "num_blocks": num_blocks,
        }


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
    do_not_specialize=["num_ids", "num_blocks", "begins", "patience_ns"],
    do_not_specialize_on_alignment=["ids_ptr"],
)
def _count_kernel(
    total_ptr,  # (E + 1,) int32
    row_ptr,  # (W,) int32, out; not written without HAS_ROW
    choice_ptr,  # (4,) int32: policy, threshold, speeds, time
    decision_ptr,  # (1,) int32: of the layer before; not read without HAS_DECISION
    turns_ptr,  # (4,) int32: turns; arrivals: blocks, columns, the row
    inboxes_ptr,  # (R,) int64; this and the next five are not read without HAS_EXCHANGE
    rows_ptr,  # (R, W) int32, out
    epoch_ptr,  # (2,) int64
    status_ptr,  # (1,) int32
    rank,
    patience_ns: tl.int64,
    begins,  # whether the layer is its batch's first
    ids_ptr,  # (N,) int32 or int64
    counts_ptr,  # (B, E + 1) int32; the last column counts unknown ids
    num_ids,
    num_blocks,
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
    HAS_EXCHANGE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    if is_off(decision_ptr, begins, HAS_DECISION):
        return
    turn = take_turn(turns_ptr)
    is_last = turn < 0  # of the launch
    if turn < num_blocks:
        _count_block(ids_ptr, counts_ptr, turn, num_ids, NUM_EXPERTS, NUM_BINS, BLOCK)
        arrive(turns_ptr + 1)
    elif turn < num_blocks + NUM_SUMS:
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
            if HAS_ROW:
                fill_row(total_ptr, choice_ptr, row_ptr, NUM_EXPERTS, HAS_LOAD, BLOCK_EXPERTS)
            if HAS_EXCHANGE:
                arrive(turns_ptr + 3)
            else:
                is_last = turn >= 0
    elif HAS_EXCHANGE:
        program = turn - num_blocks - NUM_SUMS
        if program < NUM_RANKS:
            await_arrivals(turns_ptr + 3, 1)
        is_last = exchange_program(
            program,
            row_ptr,
            inboxes_ptr,
            rows_ptr,
            epoch_ptr,
            status_ptr,
            rank,
            patience_ns,
            NUM_RANKS,
            WIDTH,
            BLOCK_WIDTH,
        )
    if is_last:
        tl.store(turns_ptr + tl.arange(0, 4), tl.zeros((4,), tl.int32))


def blocks_of(num_ids: int) -> int:
    """Programs that count so many ids, or look them up."""
    return max(1, -(-num_ids // BLOCK_IDS))


def _num_sums(num_columns: int) -> int:
    """Programs of the running sum."""
    return -(-num_columns // _BLOCK_COLUMNS)


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
        begins: whether this is that layer; the same on every rank.
        inboxes: through which the row is exchanged; None where it is not. Rows that did not arrive
            are garbage, and if a wait was given up before, the row is not pushed.
        rows: (R, W) int32, with ``inboxes``: where all ranks' rows are written to.
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{topk_ids.dtype = } must be int32 or int64")
    own = buffers or new_count_buffers(
        topk_ids.numel(), num_logical_experts, topk_ids.device, has_load=has_load
    )
    power = 1 << (num_logical_experts - 1).bit_length()  # triton's own functions are slow
    row = own.counted.row
    width, num_ranks = row.numel(), 0 if inboxes is None else inboxes.addresses.numel()
    assert inboxes is None or (choice is not None and rows is not None), "nothing to exchange"
    changed = own.changed_by(topk_ids, num_ranks)
    launch(
        _count_kernel,
        changed.pop("grid"),
        own.total,
        row,
        own.turns if choice is None else choice,
        own.turns if decision is None else decision,
        own.turns,
        own.turns if inboxes is None else inboxes.addresses,
        own.turns if rows is None else rows,
        own.turns if inboxes is None else inboxes.epoch,
        own.turns if inboxes is None else inboxes.status,
        0 if inboxes is None else inboxes.rank,
        0 if inboxes is None else inboxes.patience_ns,
        int(begins),
        **changed,
        NUM_EXPERTS=num_logical_experts,
        NUM_BINS=power,
        BLOCK=BLOCK_IDS,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_EXPERTS=max(32, power),
        NUM_SUMS=_num_sums(num_logical_experts + 1),
        HAS_ROW=choice is not None,
        HAS_LOAD=width > HEADER_WIDTH,
        HAS_DECISION=decision is not None,
        HAS_EXCHANGE=inboxes is not None,
        NUM_RANKS=num_ranks,
        WIDTH=width,
        BLOCK_WIDTH=row_block(width),
        num_warps=4,
    )
    return own.counted
