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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ultraep_kernels.device._decisions import PLANNED
from ultraep_kernels.device._signals import clock, fence_aliases, post, read_flags, verdict, wait
from ultraep_kernels.device.launch import launch
from ultraep_kernels.device.relays import Sends
from ultraep_kernels.device.status import RELAY_TIMEOUT, SLOT_TIMEOUT, TIMEOUTS

__all__ = ["StreamTables", "stream", "stream_program"]

_BLOCK_WORDS = 4096  # of 4 bytes, per step of a copy
_NUM_WARPS = 8
_FLAGS_PER_LOOK = 32 * _NUM_WARPS  # one by each thread of a program that waits for a slot


@dataclass(frozen=True)
class StreamTables:
    """Where everything lies; all int64 on the device, addresses as mapped by this rank."""

    master_addresses: torch.Tensor  # (N,): this rank's N expert tensors
    pool_addresses: torch.Tensor  # (R,): the ranks' slot pools
    region_offsets: torch.Tensor  # (N,): bytes from the pool's start to a tensor's slots
    expert_bytes: torch.Tensor  # (N,): bytes of one expert in each tensor
    chunks: torch.Tensor  # (C, 3): tensor index, offset and size in bytes
    flag_addresses: torch.Tensor  # (R,): the ranks' chunk flags, (S, max_chunks) int64 each
    max_chunks: int  # chunks of the largest layer


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
    tasks_ptr,  # (2, 1 + R * S) int32
    slot_expert_ptr,  # (R, S) int32
    parents_ptr,  # (R, S) int32
    masters_ptr,  # (N,) int64
    pools_ptr,  # (R,) int64
    regions_ptr,  # (N,) int64
    expert_bytes_ptr,  # (N,) int64
    chunks_ptr,  # (C, 3) int64
    flags_ptr,  # (R,) int64
    epoch_ptr,  # (2,) int64
    status_ptr,  # (1,) int32
    decision_ptr,  # (1,) int32; this and what follows are not read without HAS_WAIT
    reported_ptr,  # (1,) int32 of the host
    rank,
    num_chunks,
    max_chunks,
    patience_ns,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,  # that send, and as many that forward
    BLOCK: tl.constexpr,
    BLOCK_FLAGS: tl.constexpr,
    HAS_WAIT: tl.constexpr,
):
    """One program's part; of 2 * NUM_PROGRAMS, and with HAS_WAIT of one more for each own slot."""
    epoch = tl.load(epoch_ptr)
    if program < 2 * NUM_PROGRAMS:
        if NUM_PROGRAMS > 0:
            is_relay = program >= NUM_PROGRAMS
            row_ptr = tasks_ptr + is_relay.to(tl.int32) * (NUM_RANKS * NUM_SLOTS + 1)
            num_sends = tl.load(row_ptr)
            for task in range(program % NUM_PROGRAMS, num_sends * num_chunks, NUM_PROGRAMS):
                chunk = task // num_sends  # all targets proceed at the same pace
                place = tl.load(row_ptr + 1 + task % num_sends)
                expert = tl.load(slot_expert_ptr + place)
                tensor = tl.load(chunks_ptr + chunk * 3)
                offset = tl.load(chunks_ptr + chunk * 3 + 1)
                size = tl.load(chunks_ptr + chunk * 3 + 2)
                stride = tl.load(expert_bytes_ptr + tensor)
                region = tl.load(regions_ptr + tensor)
                arrived = epoch == epoch
                if is_relay:
                    own = tl.load(parents_ptr + place) % NUM_SLOTS
                    flag = tl.load(flags_ptr + rank) + (own * max_chunks + chunk) * 8
                    arrived = wait(flag, epoch, patience_ns, status_ptr, RELAY_TIMEOUT)
                    source = tl.load(pools_ptr + rank) + region + own * stride
                else:
                    source = tl.load(masters_ptr + tensor) + (expert - rank * NUM_MASTERS) * stride
                if arrived:
                    peer = place // NUM_SLOTS
                    slot = place % NUM_SLOTS
                    target = tl.load(pools_ptr + peer) + region + slot * stride
                    _copy(target + offset, source + offset, size, BLOCK)
                    post(tl.load(flags_ptr + peer) + (slot * max_chunks + chunk) * 8, epoch)
    elif HAS_WAIT:
        awaited = program - 2 * NUM_PROGRAMS  # of this rank's slots
        is_planned = (tl.load(decision_ptr) == PLANNED) & (awaited < NUM_SLOTS)
        if tl.load(slot_expert_ptr + rank * NUM_SLOTS + awaited, mask=is_planned, other=-1) >= 0:
            first = tl.load(flags_ptr + rank) + awaited * max_chunks * 8
            since = clock()
            looks = epoch * 0
            missing = tl.full((), 0, tl.int32)
            status = tl.atomic_or(status_ptr, 0, sem="relaxed")
            for start in range(0, num_chunks, BLOCK_FLAGS):
                chunks = start + tl.arange(0, BLOCK_FLAGS)
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


@triton.jit(do_not_specialize=["num_chunks", "max_chunks", "patience_ns"])
def _stream_kernel(
    tasks_ptr,
    slot_expert_ptr,
    parents_ptr,
    masters_ptr,
    pools_ptr,
    regions_ptr,
    expert_bytes_ptr,
    chunks_ptr,
    flags_ptr,
    epoch_ptr,
    status_ptr,
    decision_ptr,
    reported_ptr,
    rank,
    num_chunks,
    max_chunks,
    patience_ns: tl.int64,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_FLAGS: tl.constexpr,
    HAS_WAIT: tl.constexpr,
):
    stream_program(
        tl.program_id(0),
        tasks_ptr,
        slot_expert_ptr,
        parents_ptr,
        masters_ptr,
        pools_ptr,
        regions_ptr,
        expert_bytes_ptr,
        chunks_ptr,
        flags_ptr,
        epoch_ptr,
        status_ptr,
        decision_ptr,
        reported_ptr,
        rank,
        num_chunks,
        max_chunks,
        patience_ns,
        NUM_RANKS,
        NUM_MASTERS,
        NUM_SLOTS,
        NUM_PROGRAMS,
        BLOCK,
        BLOCK_FLAGS,
        HAS_WAIT,
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
    senders = num_programs if num_slots else 0
    has_wait = decision is not None
    launch(
        _stream_kernel,
        (2 * senders + (max(1, num_slots) if has_wait else 0),),
        sends.tasks,
        slot_expert,
        sends.parents,
        tables.master_addresses,
        tables.pool_addresses,
        tables.region_offsets,
        tables.expert_bytes,
        tables.chunks,
        tables.flag_addresses,
        epoch,
        status,
        status if decision is None else decision,
        status if reported is None else reported,
        rank,
        tables.chunks.shape[0],
        tables.max_chunks,
        patience_ns,
        NUM_RANKS=num_ranks,
        NUM_MASTERS=num_masters,
        NUM_SLOTS=num_slots,
        NUM_PROGRAMS=senders,
        BLOCK=_BLOCK_WORDS,
        BLOCK_FLAGS=_FLAGS_PER_LOOK,
        HAS_WAIT=has_wait,
        num_warps=_NUM_WARPS,
    )
