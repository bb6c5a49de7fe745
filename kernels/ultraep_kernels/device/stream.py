"""stream: master weights -> replica slots of other ranks, chunk by chunk, direct or relayed.

``send`` launches programs that work through this rank's tasks beside the engine's dispatch, and are
finite whatever other ranks do: a chunk to forward that does not come soon is left, with what
follows it, to ``receive``. That is a small launch where the experts begin, in the engine's own
stream: it forwards what is left, and ends when this rank's own slots are filled. So nothing that
waits for other ranks keeps a dispatch from starting, which they may have to wait for themselves.

Flags and chunks are those of ``host.stream``, its twin. A chunk moves 16 bytes per access where
source and target allow it, else byte by byte: keep tensors of experts 16-byte aligned. Waits are
for programs whose turn came before (``_turns``), of any rank.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.device._signals import (
    clock,
    fence_aliases,
    gives_up,
    peek,
    post,
    put,
    read_flags,
    stop,
    wait,
)
from ultraep_kernels.device._turns import arrive, take_turn
from ultraep_kernels.device.launch import Launch
from ultraep_kernels.device.relays import Sends
from ultraep_kernels.device.status import PLANNED, RELAY_TIMEOUT, SLOT_TIMEOUT, TIMEOUTS

_BLOCK_WORDS = 4096  # of 4 bytes, per step of a copy
_NUM_WARPS = 8
# of a thread: a quarter of a multiprocessor's for a program, so that others run beside it; three
# eighths in a launch that may relay, which would spill with less
_MOST_REGISTERS, _MOST_RELAYING = 64, 96
_FLAGS_PER_LOOK = 32 * _NUM_WARPS  # one by each thread of a program that waits for a slot
CHUNK_WORDS = tl.constexpr(4)
_SOON_NS = tl.constexpr(200_000)  # a relay's wait beside dispatch, which may wait for its end


class Reach(NamedTuple):
    """How a rank reaches the slots of its domain; tensors on the device."""

    pools: torch.Tensor  # (R,) int64: the ranks' slot pools as mapped by this rank
    flags: torch.Tensor  # (R,) int64: their chunk flags, (S, max_chunks) int64 each
    max_chunks: int  # of the largest layer
    status: torch.Tensor  # (1,) int32: of waits that were given up; then nothing is waited for
    reported: torch.Tensor  # (1,) int32 in page-locked memory, where such a status is written too


class Programs(NamedTuple):
    """How many of one rank send experts, and how many forward them."""

    senders: int
    relays: int  # at most MOST_RELAYS; 0 where no plan has any


class StreamSizes(NamedTuple):
    """What launches that copy are compiled for."""

    num_ranks: int
    num_masters: int
    num_slots: int  # of a rank
    programs: Programs
    block: int = _BLOCK_WORDS  # of 4 bytes, per step of a copy
    block_flags: int = _FLAGS_PER_LOOK  # looked at together
    stops: bool = True  # whether a wait that was given up stops the device


class Transfers(NamedTuple):
    """What programs that copy experts, or await them, are given."""

    sends: Any  # Sends, of the plan
    slot_expert: Any  # (R, S) int32
    reach: Any
    rank: Any  # this one
    chunks: Any  # of the layer: how many, then CHUNK_WORDS of each
    epoch: Any
    patience_ns: Any


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
def _transfer(
    program,
    done,  # of its tasks, by a launch before
    work,  # Transfers
    IS_RELAY: tl.constexpr,
    IS_LAST: tl.constexpr,  # else it leaves off where a chunk to forward does not come
    SIZES: tl.constexpr,
):
    """Send, or forward, a program's share of the chunks; how many of them it is through with."""
    STEP: tl.constexpr = SIZES.programs.relays if IS_RELAY else SIZES.programs.senders
    sends, reach, rank = work.sends, work.reach, work.rank
    row_ptr = sends.tasks + (SIZES.num_ranks * SIZES.num_slots + 1 if IS_RELAY else 0)
    num_sends, num_chunks = tl.load(row_ptr), tl.load(work.chunks).to(tl.int32)
    goes_on = num_sends >= 0
    while goes_on & (program + done * STEP < num_sends * num_chunks):
        task = program + done * STEP
        chunk = task // num_sends  # all targets proceed at the same pace
        place = tl.load(row_ptr + 1 + task % num_sends)
        expert = tl.load(work.slot_expert + place)
        chunk_ptr = work.chunks + 1 + chunk * CHUNK_WORDS
        region, stride = tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
        arrived = num_sends >= 0
        if IS_RELAY:
            own = tl.load(sends.parents + place) % SIZES.num_slots
            flag = _flag_address(reach, rank, own, chunk)
            bit: tl.constexpr = RELAY_TIMEOUT if IS_LAST else 0
            arrived = wait(flag, work.epoch, work.patience_ns, reach.status, bit)
            source = tl.load(reach.pools + rank) + region + own * stride
        else:
            own = expert - rank * SIZES.num_masters
            source = tl.load(chunk_ptr) + own * stride
        if arrived:
            peer, slot = place // SIZES.num_slots, place % SIZES.num_slots
            target = tl.load(reach.pools + peer) + region + slot * stride
            _copy(target, source, tl.load(chunk_ptr + 3), SIZES.block)
            post(_flag_address(reach, peer, slot, chunk), work.epoch)
        goes_on = arrived | IS_LAST
        done += goes_on.to(tl.int32)
    return done


@triton.jit
def _flag_address(reach, rank, slot, chunk):
    return tl.load(reach.flags + rank) + (slot * reach.max_chunks + chunk) * 8


@triton.jit
def _await_slot(
    slot,  # of this rank's
    is_planned,
    work,  # Transfers
    SIZES: tl.constexpr,
):
    """Return when every chunk of the slot is there, if it is filled.

    If any wait was given up until now, say so and go no further: experts would compute with what
    is not there, and send it to other ranks.
    """
    is_awaited, status_ptr = is_planned & (slot < SIZES.num_slots), work.reach.status
    place = work.rank * SIZES.num_slots + slot
    if tl.load(work.slot_expert + place, mask=is_awaited, other=-1) >= 0:
        first = _flag_address(work.reach, work.rank, slot, 0)
        num_chunks, since = tl.load(work.chunks).to(tl.int32), clock()
        looks = tl.full((), 0, tl.int32)
        over = looks < 0
        for start in range(0, num_chunks, SIZES.block_flags):
            chunks = start + tl.arange(0, SIZES.block_flags)
            exists = chunks < num_chunks
            missing = looks * 0 + 1
            while (missing > 0) & (over == 0):
                flags = read_flags(first + chunks * 8, exists, "relaxed")
                missing = tl.max((exists & (flags < work.epoch)).to(tl.int32), axis=0)
                if missing > 0:
                    looks += 1
                    over = gives_up(since, looks, work.patience_ns, status_ptr)
            if missing > 0:
                tl.atomic_or(status_ptr, SLOT_TIMEOUT, sem="relaxed")
            read_flags(first + chunks * 8, exists, "acquire")
        tl.debug_barrier()
        fence_aliases()
    status = peek(status_ptr)
    if (status & TIMEOUTS) != 0:
        put(work.reach.reported, status, "sys")  # as other slots' programs may
        if SIZES.stops:
            stop()


@triton.jit
def follow_program(
    program,  # of those that send, that forward, and of one for each own slot
    is_planned,
    work,  # Transfers
    SIZES: tl.constexpr,
):
    """One program's part where the launch that plans also sends, forwards and awaits."""
    COPYING: tl.constexpr = SIZES.programs.senders + SIZES.programs.relays
    if program >= COPYING:
        _await_slot(program - COPYING, is_planned, work, SIZES)
    elif is_planned:
        _copy_part(program, work, True, SIZES)


@triton.jit
def _copy_part(
    program,  # of those that send and those that forward
    work,  # Transfers
    IS_LAST: tl.constexpr,
    SIZES: tl.constexpr,
):
    if program < SIZES.programs.senders:
        _transfer(program, program * 0, work, False, True, SIZES)
    elif SIZES.programs.relays > 0:
        relay = program - SIZES.programs.senders
        done = _transfer(relay, program * 0, work, True, IS_LAST, SIZES)
        tl.store(work.sends.forwarded + relay, done)


@triton.jit
def _leave(turns_ptr):
    """The last program of a launch makes its turns and arrivals 0 again."""
    if arrive(turns_ptr + 1) == tl.num_programs(0) - 1:
        tl.store(turns_ptr + tl.arange(0, 2), tl.full((2,), 0, tl.int32))


@triton.jit(do_not_specialize=["rank"])
def _stream_kernel(chunks_ptr, sends, slot_expert_ptr, reach, rank, SIZES: tl.constexpr):
    program, epoch = take_turn(sends.turns), tl.load(sends.epoch)
    work = Transfers(sends, slot_expert_ptr, reach, rank, chunks_ptr, epoch, _SOON_NS)
    _copy_part(program, work, False, SIZES)
    _leave(sends.turns)


@triton.jit(do_not_specialize=["rank", "patience_ns"])
def _receive_kernel(
    chunks_ptr, patience_ns: tl.int64, sends, slot_expert_ptr, reach, rank, SIZES: tl.constexpr
):
    program, epoch = take_turn(sends.turns + 2), tl.load(sends.epoch)
    work = Transfers(sends, slot_expert_ptr, reach, rank, chunks_ptr, epoch, patience_ns)
    is_planned = tl.load(sends.decision) == PLANNED
    if program >= SIZES.programs.relays:
        _await_slot(program - SIZES.programs.relays, is_planned, work, SIZES)
    elif is_planned & (SIZES.programs.relays > 0):
        _transfer(program, tl.load(sends.forwarded + program), work, True, True, SIZES)
    _leave(sends.turns + 2)


class Stream:
    """Sends the experts of a plan, and awaits this rank's, layer after layer."""

    def __init__(
        self,
        sends: Sends,
        slot_expert: torch.Tensor,
        rank: int,
        reach: Reach,
        sizes: StreamSizes,
        beside: torch.Stream | None = None,
    ) -> None:
        """Of what ``rank`` sends for ``slot_expert`` (R, S) int32, its decision and epoch too.

        Masters go into the stream ``beside``, or into the one that is current.
        """
        programs = sizes.programs
        self._num_receiving = programs.relays + max(1, sizes.num_slots)
        self._num_sending = programs.senders + programs.relays
        given = {"sends": sends, "slot_expert_ptr": slot_expert, "reach": reach, "rank": rank}
        given = given | {"SIZES": sizes}
        warps, most = _NUM_WARPS, _MOST_RELAYING if programs.relays else _MOST_REGISTERS
        self._stream = Launch(
            _stream_kernel, ("chunks_ptr",), given, stream=beside, num_warps=warps, maxnreg=most
        )
        changing = "chunks_ptr", "patience_ns"
        self._receive = Launch(_receive_kernel, changing, given, num_warps=warps, maxnreg=most)

    def send(self, chunks: torch.Tensor) -> None:
        """Push this rank's masters of the layer with ``chunks``, and forward what soon is there.

        Waits for nobody.
        """
        self._stream(self._num_sending, chunks)

    def receive(self, chunks: torch.Tensor, patience_ns: int) -> None:
        """Forward what ``send`` left, and end when this rank's slots have arrived.

        Nothing is done unless the decision is PLANNED. The status gets RELAY_TIMEOUT where a chunk
        did not arrive within ``patience_ns``, which is then not forwarded, SLOT_TIMEOUT where a
        slot was not filled. Where a wait was given up until now, it is reported, and ends all work
        of this process on the device.
        """
        self._receive(self._num_receiving, chunks, patience_ns)
