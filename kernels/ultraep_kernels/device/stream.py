"""stream: master weights -> replica slots of other ranks, chunk by chunk, direct or relayed.

``stream`` is one launch of persistent programs that work through this rank's tasks: the first half
sends masters and never waits, the second half forwards from own slots, each chunk as soon as its
flag says that it is there. Further programs may end the launch only when this rank's own slots are
filled. Chunk c of slot (r, s) raises flag (r, s, c) at its target to the current epoch. Twin:
``host.stream.stream_chunks``, with the same tables.

A chunk moves 16 bytes per access where source and target allow it, else byte by byte: keep tensors
of experts 16-byte aligned. Every program waits only for programs before it, of any rank, so
programs may also run one after another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.device._decisions import PLANNED
from ultraep_kernels.device._signals import clock, fence_aliases, post, read_flags, verdict, wait
from ultraep_kernels.device.launch import launch
from ultraep_kernels.device.relays import Sends
from ultraep_kernels.device.status import RELAY_TIMEOUT, SLOT_TIMEOUT, TIMEOUTS

__all__ = ["StreamSizes", "StreamTables", "stream", "stream_program"]

_BLOCK_WORDS = 4096  # of 4 bytes, per step of a copy
_NUM_WARPS = 8
_FLAGS_PER_LOOK = 32 * _NUM_WARPS  # one by each thread of a program that waits for a slot


class StreamTables(NamedTuple):
    """Where everything lies; all int64 on the device, addresses as mapped by this rank."""

    master_addresses: torch.Tensor  # (N,): this rank's N expert tensors
    pool_addresses: torch.Tensor  # (R,): the ranks' slot pools
    region_offsets: torch.Tensor  # (N,): bytes from the pool's start to a tensor's slots
    expert_bytes: torch.Tensor  # (N,): bytes of one expert in each tensor
    chunks: torch.Tensor  # (C, 3): tensor index, offset and size in bytes
    flag_addresses: torch.Tensor  # (R,): the ranks' chunk flags, (S, max_chunks) int64 each
    max_chunks: int  # chunks of the largest layer


class StreamSizes(NamedTuple):
    """What ``stream_program`` is compiled for."""

    num_ranks: int
    num_masters: int
    num_slots: int  # of a rank
    num_programs: int  # that send, and as many that forward
    block: int  # words of 4 bytes, per step of a copy
    block_flags: int  # looked at together


@triton.jit
def _copy(target, source, size, BLOCK: tl.constexpr):
    """``size`` bytes between addresses; regions do not overlap."""
    bytes_done = size * 0
    if ((target | source) & 15) == 0:
        words = tl.multiple_of(size // 16 * 4, 4)
        source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        target_words = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        for start in range(0, words, BLOCK):
            index = start + tl.arange(0, BLOCK)
            data = tl.load(source_words + index, mask=index < words)
            tl.store(target_words + index, data, mask=index < words)
        bytes_done = words * 4
    source_bytes = source.to(tl.pointer_type(tl.uint8))
    target_bytes = target.to(tl.pointer_type(tl.uint8))
    for start in range(bytes_done, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        data = tl.load(source_bytes + index, mask=index < size)
        tl.store(target_bytes + index, data, mask=index < size)


@triton.jit
def stream_program(
    program,
    sends,
    slot_expert_ptr,  # (R, S) int32
    tables,
    rank,
    epoch_ptr,  # (1,) int64
    status_ptr,  # (1,) int32
    decision_ptr,  # (1,) int32, or None: slots are not awaited
    reported_ptr,  # (1,) int32 of the host; not with slots that are not awaited
    num_chunks,
    patience_ns,
    SIZES: tl.constexpr,
):
    """One program's part; of twice those that send, and of one more for each slot awaited."""
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    NUM_SLOTS: tl.constexpr = SIZES.num_slots
    NUM_PROGRAMS: tl.constexpr = SIZES.num_programs
    max_chunks = tables.max_chunks
    epoch = tl.load(epoch_ptr)
    if program < 2 * NUM_PROGRAMS:
        if NUM_PROGRAMS > 0:
            is_relay = program >= NUM_PROGRAMS
            row_ptr = sends.tasks + is_relay.to(tl.int32) * (NUM_RANKS * NUM_SLOTS + 1)
            num_sends = tl.load(row_ptr)
            for task in range(program % NUM_PROGRAMS, num_sends * num_chunks, NUM_PROGRAMS):
                chunk = task // num_sends  # all targets proceed at the same pace
                place = tl.load(row_ptr + 1 + task % num_sends)
                expert = tl.load(slot_expert_ptr + place)
                tensor = tl.load(tables.chunks + chunk * 3)
                offset = tl.load(tables.chunks + chunk * 3 + 1)
                size = tl.load(tables.chunks + chunk * 3 + 2)
                stride = tl.load(tables.expert_bytes + tensor)
                region = tl.load(tables.region_offsets + tensor)
                arrived = epoch == epoch
                if is_relay:
                    own = tl.load(sends.parents + place) % NUM_SLOTS
                    flag = tl.load(tables.flag_addresses + rank) + (own * max_chunks + chunk) * 8
                    arrived = wait(flag, epoch, patience_ns, status_ptr, RELAY_TIMEOUT)
                    source = tl.load(tables.pool_addresses + rank) + region + own * stride
                else:
                    source = (
                        tl.load(tables.master_addresses + tensor)
                        + (expert - rank * SIZES.num_masters) * stride
                    )
                if arrived:
                    peer = place // NUM_SLOTS
                    slot = place % NUM_SLOTS
                    target = tl.load(tables.pool_addresses + peer) + region + slot * stride
                    _copy(target + offset, source + offset, size, SIZES.block)
                    post(
                        tl.load(tables.flag_addresses + peer) + (slot * max_chunks + chunk) * 8,
                        epoch,
                    )
    elif decision_ptr is not None:
        awaited = program - 2 * NUM_PROGRAMS  # of this rank's slots
        is_planned = (tl.load(decision_ptr) == PLANNED) & (awaited < NUM_SLOTS)
        if tl.load(slot_expert_ptr + rank * NUM_SLOTS + awaited, mask=is_planned, other=-1) >= 0:
            first = tl.load(tables.flag_addresses + rank) + awaited * max_chunks * 8
            since = clock()
            looks = epoch * 0
            missing = tl.full((), 0, tl.int32)
            status = tl.atomic_or(status_ptr, 0, sem="relaxed")
            for start in range(0, num_chunks, SIZES.block_flags):
                chunks = start + tl.arange(0, SIZES.block_flags)
                missing = missing * 0 + 1
                while (missing > 0) & ((status & TIMEOUTS) == 0):
                    flags = read_flags(first + chunks * 8, chunks < num_chunks)
                    late = tl.where(chunks < num_chunks, flags < epoch, False)
                    missing = tl.max(late.to(tl.int32), axis=0)
                    if missing > 0:
                        looks += 1
                        status = verdict(since, looks, patience_ns, status_ptr, SLOT_TIMEOUT)
            if missing > 0:
                tl.atomic_or(status_ptr, SLOT_TIMEOUT)
            tl.debug_barrier()
            fence_aliases()
        status = tl.atomic_or(status_ptr, 0, sem="relaxed")
        if (status & TIMEOUTS) != 0:
            tl.store(reported_ptr, status)


@triton.jit(do_not_specialize=["rank", "num_chunks", "patience_ns"])
def _stream_kernel(
    sends,
    slot_expert_ptr,
    tables,
    rank,
    epoch_ptr,
    status_ptr,
    decision_ptr,
    reported_ptr,
    num_chunks,
    patience_ns: tl.int64,
    SIZES: tl.constexpr,
):
    stream_program(
        tl.program_id(0),
        sends,
        slot_expert_ptr,
        tables,
        rank,
        epoch_ptr,
        status_ptr,
        decision_ptr,
        reported_ptr,
        num_chunks,
        patience_ns,
        SIZES,
    )


def stream(
    sends: Sends,
    slot_expert: torch.Tensor,
    num_masters: int,
    tables: StreamTables,
    rank: int,
    epoch: torch.Tensor,
    status: torch.Tensor,
    patience_ns: int,
    num_programs: int,
    *,
    decision: torch.Tensor | None = None,
    reported: torch.Tensor | None = None,
) -> None:
    """Push this rank's masters, and forward what it relays, for the plan of this epoch.

    Args:
        sends: of this rank, from ``plan_sends``.
        slot_expert: (R, S) int32.
        num_masters: L.
        tables: of the layer.
        rank: this rank.
        epoch: (2,) int64 as ``exchange`` left it.
        status: (1,) int32; RELAY_TIMEOUT where a chunk did not arrive, which is then not forwarded.
        patience_ns: nanoseconds after which a wait is given up.
        num_programs: of senders and of relays; all must fit the device at the same time. With 0
            nothing is sent.
        decision: (1,) int32; with it the launch ends, if it is PLANNED, when this rank's slots have
            arrived too, with SLOT_TIMEOUT in the status where one has not.
        reported: (1,) int32 in page-locked memory, with ``decision``: the status of a wait that was
            given up, until now, is written there.
    """
    num_ranks, num_slots = slot_expert.shape
    sizes = StreamSizes(
        num_ranks=num_ranks,
        num_masters=num_masters,
        num_slots=num_slots,
        num_programs=num_programs if num_slots else 0,
        block=_BLOCK_WORDS,
        block_flags=_FLAGS_PER_LOOK,
    )
    waits = 0 if decision is None else max(1, num_slots)
    launch(
        _stream_kernel,
        (2 * sizes.num_programs + waits,),
        sends,
        slot_expert,
        tables,
        rank,
        epoch,
        status,
        decision,
        reported,
        tables.chunks.shape[0],
        patience_ns,
        SIZES=sizes,
        num_warps=_NUM_WARPS,
    )
