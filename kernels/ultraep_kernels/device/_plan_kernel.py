"""The planner's launch: search, write the plan out, and follow it at once.

Its programs are in this order: those of the search (``_plan_search``), those that write the plan
(``_plan_finish``), those that look up ids (``reroute``), and, where it is to, those that send and
await experts (``stream``). Each waits for programs before it only. In a layer that is left alone
none has anything to wait for once the loads have been surveyed.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._plan_finish import finish
from ultraep_kernels.device._plan_search import await_decision, search
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.reroute import assign_block
from ultraep_kernels.device.status import PLANNED
from ultraep_kernels.device.stream import Transfers, follow_program

COUNTERS = 16  # int32: turns, then arrivals; 1 to 5, 8 and 9 are the search's
_COUNTERS = tl.constexpr(COUNTERS)
_WRITTEN, _DONE = tl.constexpr(6), tl.constexpr(7)


@triton.jit(
    do_not_specialize=["num_ids", "patience_ns", "source", "rank", "min_saved"],
    # those of any batch; a line of a page; a layer's state
    do_not_specialize_on_alignment=["ids_ptr", "before_ptr", "out_ptr", "outcome_ptr", "state_ptr"],
)
def plan_kernel(
    ids_ptr,  # (N,) int32 or int64
    before_ptr,  # (B, E + 1) int32
    out_ptr,  # (N,) of the type of the ids, out
    num_ids,
    outcome_ptr,  # (outcome_width,) int32, out; or None
    state_ptr,  # (W,) int64 of the layer, where copies stay; or None
    chunks_ptr,  # of the layer, where experts are sent and awaited as well; or None
    patience_ns: tl.int64,  # of these waits
    given,  # Given
    attempts,  # Attempts, out
    found,  # DevicePlan, out
    kept,  # Kept, where copies stay; or None
    reach,  # Reach, or None
    source,
    rank,  # that sends
    min_saved,  # experts on the busiest link, from which on relays are used
    epoch_ptr,  # (1,) int64 to go with its sends; None where none are planned
    SIZES: tl.constexpr,  # PlanSizes
    RELAYS: tl.constexpr,  # RelayRule
    ASSIGNS: tl.constexpr,  # AssignSizes
    STREAMS: tl.constexpr,  # StreamSizes, or None
):
    turns_ptr = attempts.turns
    turn = take_turn(turns_ptr)
    KEEPERS: tl.constexpr = 0 if kept is None else 1
    num_searched: tl.constexpr = SIZES.num_sums + KEEPERS + SIZES.num_domains * SIZES.num_attempts
    if turn < num_searched:
        search(turn, given, attempts, found, kept, state_ptr, SIZES)
    else:
        decision = await_decision(found.decision, turns_ptr, SIZES.search.limit > 0)
        is_planned = decision == PLANNED
        program = turn - num_searched
        sender = source, rank, min_saved, epoch_ptr
        if program < SIZES.num_finished:
            made = attempts, kept, state_ptr
            finish(program, decision, given, made, found, sender, outcome_ptr, SIZES, RELAYS)
            if is_planned:
                arrive(turns_ptr + _WRITTEN)
        else:
            if is_planned:
                await_arrivals(turns_ptr + _WRITTEN, SIZES.num_finished)
            program -= SIZES.num_finished
            num_blocks = tl.maximum((num_ids + ASSIGNS.block - 1) // ASSIGNS.block, 1)
            if program < num_blocks:
                ids = ids_ptr, before_ptr, num_ids, out_ptr
                assign_block(program, is_planned, ids, found.places, given.status, ASSIGNS)
            elif chunks_ptr is not None:
                epoch = tl.load(epoch_ptr)
                transfers = Transfers(
                    found.sends, found.copied, reach, rank, chunks_ptr, epoch, patience_ns
                )
                follow_program(program - num_blocks, is_planned, transfers, STREAMS)
    if arrive(turns_ptr + _DONE) == tl.num_programs(0) - 1:
        tl.store(turns_ptr + tl.arange(0, _COUNTERS), tl.full((_COUNTERS,), 0, tl.int32))
