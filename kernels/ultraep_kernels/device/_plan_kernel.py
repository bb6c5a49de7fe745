"""The planner's launch: search, write the plan out, and where it is to, follow it at once.

Its programs are in this order: those of the search (``_plan_search``), those that write the plan
(``_plan_finish``), and, where it is to be followed, those that look up ids (``reroute``) and send
experts (``stream``). Each waits for programs before it only. In a layer that is left alone none has
anything to wait for once the loads have been surveyed.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._decisions import PLANNED
from ultraep_kernels.device._plan_finish import finish
from ultraep_kernels.device._plan_search import await_decision, search
from ultraep_kernels.device._turns import arrive, await_arrivals, take_turn
from ultraep_kernels.device.reroute import assign_block
from ultraep_kernels.device.stream import stream_program

__all__ = ["COUNTERS", "plan_kernel"]

COUNTERS = 8  # int32: turns, then arrivals; 1 to 5 are the search's
_COUNTERS = tl.constexpr(COUNTERS)
_WRITTEN, _DONE = tl.constexpr(6), tl.constexpr(7)


@triton.jit
def _follow(
    program,  # one for every block of ids, then those of ``stream``
    decision,
    slot_expert_ptr,
    ends_ptr,
    physical_ptr,
    stride_ptr,
    parents_ptr,
    tasks_ptr,
    decision_ptr,
    status_ptr,
    rank,
    ids_ptr,
    before_ptr,
    out_ptr,
    num_ids,
    num_blocks,
    masters_ptr,
    pools_ptr,
    regions_ptr,
    expert_bytes_ptr,
    chunks_ptr,
    flags_ptr,
    epoch_ptr,
    reported_ptr,
    num_chunks,
    max_chunks,
    patience_ns,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_SENDERS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    TILE_IDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_FLAGS: tl.constexpr,
):
    """One program's part in what a plan is for; ``decision`` has been awaited."""
    is_planned = decision == PLANNED
    if program < num_blocks:
        assign_block(
            program,
            is_planned,
            ids_ptr,
            before_ptr,
            ends_ptr,
            physical_ptr,
            stride_ptr,
            out_ptr,
            status_ptr,
            num_ids,
            NUM_RANKS * NUM_MASTERS,
            NUM_MASTERS,
            NUM_SLOTS,
            NUM_RANKS,
            SEARCH_STEPS,
            BLOCK_IDS,
            TILE_IDS,
        )
    elif is_planned | (program >= num_blocks + 2 * NUM_SENDERS):
        stream_program(
            program - num_blocks,
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
            NUM_SENDERS,
            BLOCK_WORDS,
            BLOCK_FLAGS,
            True,
        )


@triton.jit(
    do_not_specialize=[
        "begins",
        "source",
        "rank",
        "num_ids",
        "num_blocks",
        "num_chunks",
        "max_chunks",
        "patience_ns",
    ],
    do_not_specialize_on_alignment=["outcome_ptr", "ids_ptr"],  # a line of a page; an engine's
)
def plan_kernel(
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32, out
    speeds_ptr,  # (R,) int32; not read without HAS_SPEEDS
    keys_ptr,  # (domains, LIMIT + THRIFTY + 2) int64: of attempts, of the identity, and the goal
    held_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    quotas_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    reached_ptr,  # (domains, LIMIT + THRIFTY, 2) int32: busiest rank's time, most replicas on one
    rows_ptr,  # (R, .) int32; not read without HAS_ROWS
    stride_rows,
    winners_ptr,  # (domains,) int32, out
    decision_ptr,  # (1,) int32, in: of the layer before; out
    status_ptr,  # (1,) int32
    turns_ptr,  # (COUNTERS,) int32, zero between launches: turns, then arrivals
    threshold,
    per_assignment,
    per_read,
    per_sent,
    begins,  # whether the layer is its batch's first; without HAS_ROWS always
    slot_expert_ptr,  # (R, ALL_SLOTS) int32, out; from here on of the plan in full
    quota_ptr,  # (E, R) int32, out
    share_ptr,  # (E, R) int32, out
    ends_ptr,  # (E, R) int32, out
    physical_ptr,  # (E, R) int32, out
    stride_ptr,  # (E,) int32, out
    parents_ptr,  # (R, ALL_SLOTS) int32, out; this and the next two not without HAS_SENDS
    tasks_ptr,  # (2, 1 + R * ALL_SLOTS) int32, out
    turn_ptr,  # (R * ALL_SLOTS,) int32, scratch
    sends_decision_ptr,  # (1,) int32, out; this and the next two not without HAS_SENDS
    sends_epoch_ptr,  # (1,) int64, out
    epoch_ptr,  # (2,) int64
    outcome_ptr,  # (outcome_width,) int32, out
    source,
    rank,  # that sends
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    SWEEPS: tl.constexpr,
    NUM_SUMS: tl.constexpr,  # programs that add up
    NUM_DOMAINS: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_ALL_RANKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,  # of a rank
    FIRST_SLOT: tl.constexpr,  # of those, from which NUM_SLOTS are planned for
    HAS_SENDS: tl.constexpr,
    HAS_OUTCOME: tl.constexpr,
    LEAVES_EARLY: tl.constexpr,  # nobody reads quotas, shares and places of the identity
    MIN_REPLICAS: tl.constexpr,
    MIN_SAVED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_WRITTEN: tl.constexpr,
    NUM_FINISHED: tl.constexpr,  # programs that write the plan
    FOLLOWS: tl.constexpr,
    NUM_SENDERS: tl.constexpr,  # this and what comes after it are not used without FOLLOWS
    SEARCH_STEPS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    TILE_IDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_FLAGS: tl.constexpr,
    ids_ptr=None,  # (N,) int32 or int64; this and what follows only with FOLLOWS
    before_ptr=None,  # (B, E + 1) int32
    out_ptr=None,  # (N,) of the type of the ids, out
    num_ids=None,
    num_blocks=None,
    masters_ptr=None,  # (N,) int64; this and what follows as for ``stream_program``
    pools_ptr=None,
    regions_ptr=None,
    expert_bytes_ptr=None,
    chunks_ptr=None,
    flags_ptr=None,
    reported_ptr=None,
    num_chunks=None,
    max_chunks=None,
    patience_ns: tl.int64 = 0,
):
    turn = take_turn(turns_ptr)
    num_searched: tl.constexpr = NUM_SUMS + NUM_DOMAINS * (LIMIT + THRIFTY)
    if turn < num_searched:
        search(
            turn,
            loads_ptr,
            stride_rank,
            expert_load_ptr,
            speeds_ptr,
            keys_ptr,
            held_ptr,
            quotas_ptr,
            reached_ptr,
            rows_ptr,
            stride_rows,
            winners_ptr,
            decision_ptr,
            status_ptr,
            turns_ptr,
            threshold,
            per_assignment,
            per_read,
            per_sent,
            begins,
            NUM_RANKS,
            NUM_MASTERS,
            NUM_SLOTS,
            DOMAIN_SIZE,
            GRAIN,
            FIRST,
            LIMIT,
            THRIFTY,
            SWEEPS,
            NUM_SUMS,
            NUM_DOMAINS,
            HAS_SPEEDS,
            HAS_ROWS,
            HAS_GATE,
            BLOCK_COLUMNS,
            BLOCK_ALL_EXPERTS,
            BLOCK_ALL_RANKS,
            BLOCK_EXPERTS,
            BLOCK_RANKS,
            BLOCK_SLOTS,
            BLOCK_MASTERS,
            BLOCK_KEYS,
        )
    else:
        decision = await_decision(decision_ptr, turns_ptr, LIMIT > 0)
        if turn < num_searched + NUM_FINISHED:
            finish(
                turn - num_searched,
                decision,
                loads_ptr,
                stride_rank,
                expert_load_ptr,
                winners_ptr,
                held_ptr,
                quotas_ptr,
                slot_expert_ptr,
                quota_ptr,
                share_ptr,
                ends_ptr,
                physical_ptr,
                stride_ptr,
                parents_ptr,
                tasks_ptr,
                turn_ptr,
                sends_decision_ptr,
                sends_epoch_ptr,
                epoch_ptr,
                rows_ptr,
                speeds_ptr,
                outcome_ptr,
                source,
                rank,
                NUM_RANKS,
                NUM_MASTERS,
                NUM_SLOTS,
                ALL_SLOTS,
                FIRST_SLOT,
                DOMAIN_SIZE,
                LIMIT,
                THRIFTY,
                HAS_SENDS,
                HAS_OUTCOME,
                LEAVES_EARLY,
                MIN_REPLICAS,
                MIN_SAVED,
                TILE,
                BLOCK_PLACES,
                BLOCK_WRITTEN,
                BLOCK_ALL_RANKS,
            )
            arrive(turns_ptr + _WRITTEN)
        elif FOLLOWS:
            if decision == PLANNED:
                await_arrivals(turns_ptr + _WRITTEN, NUM_FINISHED)
            _follow(
                turn - (num_searched + NUM_FINISHED),
                decision,
                slot_expert_ptr,
                ends_ptr,
                physical_ptr,
                stride_ptr,
                parents_ptr,
                tasks_ptr,
                decision_ptr,
                status_ptr,
                rank,
                ids_ptr,
                before_ptr,
                out_ptr,
                num_ids,
                num_blocks,
                masters_ptr,
                pools_ptr,
                regions_ptr,
                expert_bytes_ptr,
                chunks_ptr,
                flags_ptr,
                epoch_ptr,
                reported_ptr,
                num_chunks,
                max_chunks,
                patience_ns,
                NUM_RANKS,
                NUM_MASTERS,
                ALL_SLOTS,
                NUM_SENDERS,
                SEARCH_STEPS,
                BLOCK_IDS,
                TILE_IDS,
                BLOCK_WORDS,
                BLOCK_FLAGS,
            )
    if arrive(turns_ptr + _DONE) == tl.num_programs(0) - 1:
        tl.store(turns_ptr + tl.arange(0, _COUNTERS), tl.zeros((_COUNTERS,), tl.int32))
