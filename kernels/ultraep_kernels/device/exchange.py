"""exchange: every rank's row of int32 -> all rows (R, W) on every rank, through peer memory.

It is the end of the launch that counts, or a launch of its own. R programs push this rank's row
into one peer's inbox each and raise a flag there; R more wait for one peer's row each and copy it
out. The launch follows, in stream order, the expert kernel of the layer before, so it is the fence
that ``host.exchange``, its twin, describes, with two rows of each rank as there. A rank that has
given up a wait pushes nothing any more: it no longer knows that its rows were read, and the others
give up too.

The epoch is counted on the device, so that a captured graph can be replayed. Waits are for pushes
of programs whose turn came before (``_turns``), of any rank.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels import contract
from ultraep_kernels.device._signals import peek, post, wait
from ultraep_kernels.device._turns import arrive, take_turn
from ultraep_kernels.device.status import EXCHANGE_TIMEOUT, TIMEOUTS

_FLAG_BYTES = tl.constexpr(contract.FLAG_BYTES)
_HEADER_WIDTH = tl.constexpr(contract.HEADER_WIDTH)
_POLICY, _UNKNOWN = tl.constexpr(contract.POLICY), tl.constexpr(contract.UNKNOWN)
_CHECKSUM = tl.constexpr(contract.CHECKSUM)
_TIME, _FORGET = tl.constexpr(contract.TIME), tl.constexpr(contract.FORGET)


class Inboxes(NamedTuple):
    """Where a rank's row goes, and whence everybody's comes."""

    addresses: torch.Tensor  # (R,) int64 of all ranks' inboxes as mapped here, 8-byte aligned
    rank: int  # this one
    epoch: torch.Tensor  # (3,) int64, from ``new_epoch``; all ranks start and count alike
    status: torch.Tensor  # (1,) int32; EXCHANGE_TIMEOUT where a row did not arrive


class RowSizes(NamedTuple):
    """What ``exchange_program`` is compiled for."""

    num_ranks: int
    width: int  # int32 of a row
    block: int  # at least as many


@triton.jit
def _row_address(inboxes, owner, sender, epoch, SIZES: tl.constexpr):
    """Where ``sender``'s row of ``epoch`` lies in the inbox of ``owner``."""
    index = (epoch % 2) * SIZES.num_ranks + sender
    rows = tl.load(inboxes.addresses + owner) + SIZES.num_ranks * _FLAG_BYTES
    return rows + index * (SIZES.width * 4)


@triton.jit
def exchange_program(
    program,  # of 2 * R; those that push come first
    given,  # (W,) int32; Inboxes; (R, W) int32, out; nanoseconds of a wait
    SIZES: tl.constexpr,
):
    """One program's part; whether it is the last to finish, when the epoch has been counted."""
    row_ptr, inboxes, out_ptr, patience_ns = given
    rank, status_ptr = inboxes.rank, inboxes.status
    epoch = tl.load(inboxes.epoch) + 1
    peer = program % SIZES.num_ranks
    columns = tl.arange(0, SIZES.block)
    mask = columns < SIZES.width
    if program < SIZES.num_ranks:
        if (peek(status_ptr) & TIMEOUTS) == 0:
            row = tl.load(row_ptr + columns, mask=mask, other=0)
            address = _row_address(inboxes, peer, rank, epoch, SIZES)
            tl.store(address.to(tl.pointer_type(tl.int32)) + columns, row, mask=mask)
            post(tl.load(inboxes.addresses + peer) + rank * _FLAG_BYTES, epoch)
    else:
        flag = tl.load(inboxes.addresses + rank) + peer * _FLAG_BYTES
        arrived = wait(flag, epoch, patience_ns, status_ptr, EXCHANGE_TIMEOUT)
        address = _row_address(inboxes, rank, peer, epoch, SIZES)
        source = address.to(tl.pointer_type(tl.int32)) + columns
        there = columns < tl.where(arrived, SIZES.width, 0)  # a late row may be written just then
        row = tl.load(source, mask=there, other=0)
        tl.store(out_ptr + peer * SIZES.width + columns, row, mask=mask)
    finished = arrive(inboxes.epoch + 1) + 1
    is_last = finished % (2 * SIZES.num_ranks) == 0  # all others have read the epoch
    if is_last:
        tl.store(inboxes.epoch, epoch)
    return is_last


@triton.jit(do_not_specialize=["patience_ns"])
def _exchange_kernel(row_ptr, inboxes, out_ptr, patience_ns: tl.int64, SIZES: tl.constexpr):
    program = take_turn(inboxes.epoch + 2) % (2 * SIZES.num_ranks)
    exchange_program(program.to(tl.int32), (row_ptr, inboxes, out_ptr, patience_ns), SIZES)


def inbox_bytes(num_ranks: int, width: int) -> int:
    """Size of a rank's inbox: R flags and twice R rows of ``width`` int32. Zero at first."""
    return num_ranks * (contract.FLAG_BYTES + 2 * width * 4)


def new_epoch(device: torch.device | str) -> torch.Tensor:
    """Epoch counter of one rank, int64 (3,): epochs done, programs finished, programs started.

    The last are those of ``exchange``; where another launch exchanges they have turns of its own.
    """
    return torch.zeros(3, dtype=torch.int64, device=device)


def exchange(row: torch.Tensor, inboxes: Inboxes, patience_ns: int) -> torch.Tensor:
    """All ranks' rows (R, W) int32 of the next epoch, which is counted; ``row`` (W,) int32.

    A wait is given up after ``patience_ns`` nanoseconds; rows that did not arrive are garbage. If
    one was given up before, the row is not pushed.
    """
    num_ranks, width = inboxes.addresses.numel(), row.numel()
    out = torch.empty((num_ranks, width), dtype=torch.int32, device=row.device)
    sizes = row_sizes(num_ranks, width)
    _exchange_kernel[(2 * num_ranks,)](row, inboxes, out, patience_ns, SIZES=sizes, num_warps=4)
    return out


def row_sizes(num_ranks: int, width: int) -> RowSizes:
    """Of rows of ``width`` int32; triton's own functions are slow."""
    return RowSizes(num_ranks, width, 1 << (width - 1).bit_length())


@triton.jit
def fill_row(
    total_ptr,  # (E + 1,) int32: load, then how many ids could not be counted
    choice_ptr,  # (3,) int32, as ``contract.Choice``
    row_ptr,  # (W,) int32, out
    SIZES: tl.constexpr,  # as those of ``count``
):
    """This rank's row: W = HEADER_WIDTH, and E more where it has a load; else its checksum."""
    experts = tl.arange(0, SIZES.block_experts)
    mask = experts < SIZES.num_experts
    load = tl.load(total_ptr + experts, mask=mask, other=0)
    checksum = tl.sum(load, axis=0) * 0
    if SIZES.has_load:
        tl.store(row_ptr + _HEADER_WIDTH + experts, load, mask=mask)
    else:
        bits = load.to(tl.uint32) * 0x9E3779B1 + experts.to(tl.uint32) * 0x85EBCA77
        bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D
        bits = tl.where(mask, bits ^ (bits >> 13), 0)
        checksum = tl.xor_sum(bits.to(tl.int32), axis=0)
    columns = tl.arange(0, _HEADER_WIDTH)
    header = tl.where(columns == _POLICY, tl.load(choice_ptr), 0)
    header = tl.where(columns == _UNKNOWN, tl.load(total_ptr + SIZES.num_experts), header)
    header = tl.where(columns == _CHECKSUM, checksum, header)
    header = tl.where(columns == _TIME, tl.load(choice_ptr + 1), header)
    header = tl.where(columns == _FORGET, tl.load(choice_ptr + 2), header)
    tl.store(row_ptr + columns, header)
