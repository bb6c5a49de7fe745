"""exchange: every rank's row of int32 -> all rows (R, W) on every rank, through peer memory.

One launch. The first R programs push this rank's row into one peer's inbox each and raise a flag
there; the last R wait for one peer's row each and copy it out. It is also the fence: the launch
follows, in stream order, the expert kernel of the layer before, so whoever has read a rank's row
may overwrite that rank's replica slots. Inboxes hold every row twice, by parity of the epoch: a
rank pushes epoch n + 2 only after everybody pushed n + 1, hence finished reading n.

The epoch is counted on the device, so that a captured graph can be replayed. Waits of a program are
for pushes of lower-numbered programs, so programs may also run one after another.
"""

import torch
import triton
import triton.language as tl

from ultraep_kernels.device._signals import post, wait
from ultraep_kernels.device.status import EXCHANGE_TIMEOUT
from ultraep_kernels.exchange import FLAG_BYTES

__all__ = ["exchange", "inbox_bytes", "new_epoch"]

_FLAG_BYTES = tl.constexpr(FLAG_BYTES)


@triton.jit
def _row_address(inboxes_ptr, owner, sender, epoch, NUM_RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Where ``sender``'s row of ``epoch`` lies in the inbox of ``owner``."""
    index = (epoch % 2) * NUM_RANKS + sender
    return tl.load(inboxes_ptr + owner) + NUM_RANKS * _FLAG_BYTES + index * (WIDTH * 4)


@triton.jit
def _exchange_kernel(
    row_ptr,  # (W,) int32
    inboxes_ptr,  # (R,) int64: address of every rank's inbox
    out_ptr,  # (R, W) int32
    epoch_ptr,  # (2,) int64: the epoch before this one, programs finished so far
    status_ptr,  # (1,) int32
    rank,
    patience_ns,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    peer = program % NUM_RANKS
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    if program < NUM_RANKS:
        row = tl.load(row_ptr + columns, mask=mask, other=0)
        address = _row_address(inboxes_ptr, peer, rank, epoch, NUM_RANKS, WIDTH)
        tl.store(address.to(tl.pointer_type(tl.int32)) + columns, row, mask=mask)
        post(tl.load(inboxes_ptr + peer) + rank * _FLAG_BYTES, epoch)
    else:
        flag = tl.load(inboxes_ptr + rank) + peer * _FLAG_BYTES
        wait(flag, epoch, patience_ns, status_ptr, EXCHANGE_TIMEOUT)
        address = _row_address(inboxes_ptr, rank, peer, epoch, NUM_RANKS, WIDTH)
        row = tl.load(address.to(tl.pointer_type(tl.int32)) + columns, mask=mask, other=0)
        tl.store(out_ptr + peer * WIDTH + columns, row, mask=mask)
    finished = tl.atomic_add(epoch_ptr + 1, 1) + 1
    if finished % (2 * NUM_RANKS) == 0:  # the last program: all others have read the epoch
        tl.store(epoch_ptr, epoch)


def inbox_bytes(num_ranks: int, width: int) -> int:
    """Size of a rank's inbox: R flags and twice R rows of ``width`` int32. Zero at first."""
    return num_ranks * (FLAG_BYTES + 2 * width * 4)


def new_epoch(device: torch.device | str) -> torch.Tensor:
    """Epoch counter of one rank, int64 (2,): epochs done, programs finished."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def exchange(
    row: torch.Tensor,
    inboxes: torch.Tensor,
    rank: int,
    epoch: torch.Tensor,
    status: torch.Tensor,
    patience_ns: int,
) -> torch.Tensor:
    """All ranks' rows (R, W) int32 of the next epoch; advances ``epoch``.

    Args:
        row: (W,) int32, this rank's contribution.
        inboxes: (R,) int64, addresses of all ranks' inboxes as mapped here, 8-byte aligned.
        rank: this rank.
        epoch: (2,) int64, from ``new_epoch``; all ranks start and count alike.
        status: (1,) int32; EXCHANGE_TIMEOUT where a row did not arrive, which then is garbage.
        patience_ns: nanoseconds after which a wait is given up.
    """
    num_ranks, width = inboxes.numel(), row.numel()
    out = torch.empty((num_ranks, width), dtype=torch.int32, device=row.device)
    _exchange_kernel[(2 * num_ranks,)](
        row,
        inboxes,
        out,
        epoch,
        status,
        rank,
        patience_ns,
        NUM_RANKS=num_ranks,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out
