"""count: topk_ids (T, K) logical -> load (E,), and how many of each expert precede a block of ids.

One launch: a histogram per block of ids, then for every expert a running sum over the blocks. The
sum ends in the load; its partial sums give ``reroute`` how many assignments of an expert precede a
block. Where the layer's row is wanted, the last program to arrive writes it; where it is to be
exchanged, further programs of the launch do that (``exchange``).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.exchange import Inboxes, RowSizes, exchange_program, fill_row, row_sizes
from ultraep_kernels.device.launch import Launch

BLOCK_IDS = 128  # ids per program; reroute compares them pairwise
_BLOCK_COLUMNS = 8  # experts per program of the running sum
_BLOCK_ROWS = 128  # blocks per step of the running sum


class RowWanted(NamedTuple):
    """What a layer's row is made with, and exchanged through."""

    choice: torch.Tensor | None  # (3,) int32, ``contract.Choice`` of this rank
    inboxes: Inboxes | None = None  # None: the row is not exchanged
    rows: torch.Tensor | None = None  # (R, W) int32, out: all ranks'


class _Sizes(NamedTuple):
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
    offsets = block * SIZES.block + tl.arange(0, SIZES.block)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (ids >= 0) & (ids < SIZES.num_experts)
    counts = tl.histogram(tl.where(valid, ids, 0).to(tl.int32), SIZES.num_bins, mask=valid)
    unknown = tl.sum(((ids != -1) & ~valid).to(tl.int32), axis=0)
    bins = tl.arange(0, SIZES.num_bins)
    row_ptr = before_ptr + block.to(tl.int64) * (SIZES.num_experts + 1)
    tl.store(row_ptr + bins, counts, mask=bins < SIZES.num_experts)
    tl.store(row_ptr + SIZES.num_experts, unknown)


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
    do_not_specialize=["num_ids", "patience_ns"],
    do_not_specialize_on_alignment=["ids_ptr", "before_ptr"],  # an engine's; of any batch
)
def _count_kernel(
    ids_ptr,  # (N,) int32 or int64
    before_ptr,  # (B, E + 1) int32; the last column counts unknown ids
    num_ids,
    patience_ns: tl.int64,
    total_ptr,  # (E + 1,) int32, out
    row_ptr,  # (W,) int32, out; not written without a choice
    turns_ptr,  # (4,) int32: turns; arrivals: blocks, columns, the row
    wanted,  # RowWanted
    SIZES: tl.constexpr,
):
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
            if wanted.choice is not None:
                fill_row(total_ptr, wanted.choice, row_ptr, SIZES)
            if wanted.inboxes is not None:
                arrive(turns_ptr + 3)
            else:
                is_last = turn >= 0
    elif wanted.inboxes is not None:
        program = turn - num_blocks - SIZES.num_sums
        if program < SIZES.rows.num_ranks:
            await_arrivals(turns_ptr + 3, 1)
        exchanged = row_ptr, wanted.inboxes, wanted.rows, patience_ns
        is_last = exchange_program(program, exchanged, SIZES.rows)
    if is_last:
        tl.store(turns_ptr + tl.arange(0, 4), tl.full((4,), 0, tl.int32))


class Count:
    """Counts ids, layer after layer; twin ``host.count.count``.

    Attributes, tensors on the device:
        load: (E,) int32, assignments per logical expert.
        unknown: (1,) int32, ids that were neither an expert nor padding.
        before: (B or more, E + 1) int32, assignments of each expert in earlier blocks of ids.
        row: (W,) int32, of the exchange, where it is wanted. If a wait was given up before, it is
            not pushed; all ranks' rows are garbage where they did not arrive.
    """

    def __init__(
        self,
        num_logical_experts: int,
        device: torch.device | str,
        wanted: RowWanted | None = None,
        total: torch.Tensor | None = None,
        *,
        has_load: bool = True,
    ) -> None:
        """For E experts; ``total`` (E + 1,) int32 where load and unknown are to lie.

        ``has_load``: whether the load follows the header of a row; else it has its checksum.
        """
        if total is None:
            total = torch.empty(num_logical_experts + 1, dtype=torch.int32, device=device)
        self.load, self.unknown = total[:num_logical_experts], total[num_logical_experts:]
        width = HEADER_WIDTH + (num_logical_experts if has_load else 0)
        self.row = torch.empty(width, dtype=torch.int32, device=device)
        self._befores: dict[int, torch.Tensor] = {}  # by number of blocks; graphs keep them
        self.fit(self.row[:0])
        wanted = wanted or RowWanted(None)
        inboxes, num_sums = wanted.inboxes, -(-(num_logical_experts + 1) // _BLOCK_COLUMNS)
        num_ranks = 0 if inboxes is None else inboxes.addresses.numel()
        self._others = num_sums + 2 * num_ranks  # programs beside those of blocks
        power = 1 << (num_logical_experts - 1).bit_length()  # triton's own functions are slow
        sizes = _Sizes(
            num_experts=num_logical_experts,
            num_bins=power,
            num_sums=num_sums,
            block_experts=max(32, power),
            has_load=has_load,
            rows=row_sizes(num_ranks, width),
        )
        given = {
            "total_ptr": total,
            "row_ptr": self.row,
            "turns_ptr": torch.zeros(4, dtype=torch.int32, device=device),
            "wanted": wanted,
            "SIZES": sizes,
        }
        changing = "ids_ptr", "before_ptr", "num_ids", "patience_ns"
        self._launch = Launch(_count_kernel, changing, given, num_warps=4)

    def fit(self, topk_ids: torch.Tensor) -> None:
        """Make room for ids like ``topk_ids`` int32 or int64, as many, in the layers that follow.

        Raises ValueError for ids of another type.
        """
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{topk_ids.dtype = } must be int32 or int64")
        self.num_ids = topk_ids.numel()
        self.blocks = blocks_of(self.num_ids)
        size = 1 << (self.blocks - 1).bit_length()
        if size not in self._befores:
            self._befores[size] = self.row.new_empty((size, self.load.numel() + 1))
        self.before = self._befores[size]

    def __call__(self, topk_ids: torch.Tensor, patience_ns: int = 0) -> None:
        """Count ``topk_ids`` (T, K), contiguous, like those that were made room for last.

        -1 is padding and never counts, T may be 0. A wait for a rank's row is given up after
        ``patience_ns``.
        """
        programs = self.blocks + self._others
        self._launch(programs, topk_ids, self.before, self.num_ids, patience_ns)


def blocks_of(num_ids: int) -> int:
    """Programs that count so many ids, or look them up."""
    return max(1, -(-num_ids // BLOCK_IDS))
