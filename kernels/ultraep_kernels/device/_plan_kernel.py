"""The planner's launch: search, write the plan out, and where it is to, follow it at once.

Its programs are in this order: those of the search (``_plan_search``), those that write the plan
(``_plan_finish``), and, where it is to be followed, those that look up ids (``reroute``) and send
experts (``stream``). Each waits for programs before it only. In a layer that is left alone none has
anything to wait for once the loads have been surveyed.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ultraep_kernels.device._decisions import PLANNED
from ultraep_kernels.device._plan_finish import finish
from ultraep_kernels.device._plan_search import await_decision, search
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.reroute import assign_block
from ultraep_kernels.device.stream import Transfers, follow_program

__all__ = ["COUNTERS", "Given", "plan_kernel"]

COUNTERS = 8  # int32: turns, then arrivals; 1 to 5 are the search's
_COUNTERS = tl.constexpr(COUNTERS)
_WRITTEN, _DONE = tl.constexpr(6), tl.constexpr(7)


class Given(NamedTuple):
    """What a plan is made from; tensors on the device."""

    loads: Any  # Rows: (R, E) int32
    rows: Any  # Rows: (R, .) int32 as exchanged; or None
    speeds: Any  # (R,) int32; None where all are equal
    gate: Any  # GateValues, or None
    status: Any  # (1,) int32


class _Sender(NamedTuple):
    """Whose shares and sends are planned."""

    source: Any
    rank: Any
    min_saved: Any
    epoch: Any


@triton.jit(
    do_not_specialize=["begins", "source", "rank", "min_saved", "num_ids", "patience_ns"],
    # a line of a page; an engine's; those of any batch
    do_not_specialize_on_alignment=["outcome_ptr", "ids_ptr", "before_ptr", "out_ptr"],
)
def plan_kernel(
    given,  # Given
    attempts,  # Attempts, out
    found,  # DevicePlan, out; its decision, in: of the layer before
    outcome_ptr,  # (outcome_width,) int32, out; or None
    begins,  # whether the layer is its batch's first; without rows always
    source,
    rank,  # that sends
    min_saved,  # experts on the busiest link, from which on relays are used
    epoch_ptr,  # (1,) int64 to go with its sends; None where none are planned
    SIZES: tl.constexpr,  # PlanSizes
    RELAYS: tl.constexpr,  # RelayRule
    LEAVES_EARLY: tl.constexpr,  # nobody reads quotas, shares and places of the identity
    ids_ptr=None,  # (N,) int32 or int64; this and the next three where ids are looked up
    before_ptr=None,  # (B, E + 1) int32
    num_ids=None,
    out_ptr=None,  # (N,) of the type of the ids, out
    tables=None,  # StreamTables; this and the next two where experts are sent as well
    reported_ptr=None,  # (1,) int32 of the host
    patience_ns: tl.int64 = 0,
    ASSIGNS: tl.constexpr = None,  # AssignSizes
    STREAMS: tl.constexpr = None,  # StreamSizes
):
    turns_ptr = attempts.turns
    turn = take_turn(turns_ptr)
    num_attempts: tl.constexpr = SIZES.search.limit + SIZES.search.thrifty
    num_searched: tl.constexpr = SIZES.num_sums + SIZES.num_domains * num_attempts
    if turn < num_searched:
        search(turn, given, begins, attempts, found, SIZES)
    else:
        decision = await_decision(found.decision, turns_ptr, SIZES.search.limit > 0)
        is_planned = decision == PLANNED
        program = turn - num_searched
        sender = _Sender(source, rank, min_saved, epoch_ptr)
        if program < SIZES.num_finished:
            finish(
                program,
                decision,
                given,
                attempts,
                found,
                sender,
                outcome_ptr,
                SIZES,
                RELAYS,
                LEAVES_EARLY,
            )
            if is_planned:
                arrive(turns_ptr + _WRITTEN)
        elif ASSIGNS is not None:
            if is_planned:
                await_arrivals(turns_ptr + _WRITTEN, SIZES.num_finished)
            program -= SIZES.num_finished
            num_blocks = tl.maximum((num_ids + ASSIGNS.block - 1) // ASSIGNS.block, 1)
            if program < num_blocks:
                ids = ids_ptr, before_ptr, num_ids, out_ptr
                assign_block(program, is_planned, ids, found.places, given.status, ASSIGNS)
            elif STREAMS is not None:
                waits = given.status, reported_ptr, patience_ns
                transfers = Transfers(
                    found.sends, found.slot_expert, tables, rank, tl.load(epoch_ptr), *waits
                )
                follow_program(program - num_blocks, is_planned, transfers, STREAMS)
    if arrive(turns_ptr + _DONE) == tl.num_programs(0) - 1:
        tl.store(turns_ptr + tl.arange(0, _COUNTERS), tl.full((_COUNTERS,), 0, tl.int32))
