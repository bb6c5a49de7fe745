"""The planner's search: sum the loads, survey them, attempt, take the best.

Programs that add up loads come first; the last of them to arrive surveys (``_plan_decide``), and a
layer that can be left alone is. Then one program makes each attempt: those of the first wave and
the thrifty ones, then those of the second, which return at once where the first reached the goal.
The last of the wave that is enough takes the winners, and what was decided stands. Where copies
stay (``_plan_residents``) a program decides before whether any of this is wanted. An attempt
leaves a key that sorts attempts by what the planner minimises: the busiest rank's time (not below
the goal), the replicas sent by one rank, the replicas.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._plan_attempt import attempt, count_replicas, relax
from ultraep_kernels.device._plan_decide import NO_KEY, is_reached, survey, take_winners
from ultraep_kernels.device._plan_grow import grow
from ultraep_kernels.device._plan_level import speeds_in
from ultraep_kernels.device._plan_residents import (
    compare_fresh,
    decide,
    forget_what_changed,
    split_again,
    split_residents,
)
from ultraep_kernels.device._plan_times import FULL, busiest
from ultraep_kernels.device._signals import peek
from ultraep_kernels.device._turns import arrive, await_arrivals
from ultraep_kernels.device.reroute import every_32nd
from ultraep_kernels.device.status import PLANNED

# arrivals, each a counter of the launch
_SUMMED, _SURVEYED, _FIRST_WAVE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_ATTEMPTED, _DECIDED = tl.constexpr(4), tl.constexpr(5)
_SPLIT, _GROWN = tl.constexpr(8), tl.constexpr(9)


@triton.jit
def _add_up(loads, expert_load_ptr, program, SIZES: tl.constexpr):
    """Store expert_load (E,) int32; -1 where an expert's loads are impossible."""
    columns = program * SIZES.experts_summed + tl.arange(0, SIZES.experts_summed)
    ranks = tl.arange(0, SIZES.block_all_ranks)
    is_expert = columns < SIZES.num_experts
    mask = (ranks < SIZES.num_ranks)[:, None] & is_expert[None, :]
    offsets = ranks.to(tl.int64)[:, None] * loads.stride + columns[None, :]
    values = tl.load(loads.table + offsets, mask=mask, other=0)
    # below 2**13 there is no negative load, and the sum has 30 bits; more are impossible anyway
    high = tl.sum((values.to(tl.uint32) >> 16).to(tl.int32), axis=0)
    load = tl.where(high < (1 << 13), tl.sum(values, axis=0), -1)
    tl.store(expert_load_ptr + columns, load, mask=is_expert)


@triton.jit
def _attempt(
    domain,
    number,  # of the attempt; from LIMIT on it is thrifty
    is_second,  # whether it belongs to the second wave
    expert_load_ptr,
    attempts,
    SIZES: tl.constexpr,
):
    NUM_MASTERS: tl.constexpr = SIZES.num_masters
    row_ptr = attempts.keys + domain * (SIZES.num_attempts + 1)
    goal, identity = tl.load(attempts.goal), tl.load(row_ptr + SIZES.num_attempts)
    numbers = tl.arange(0, SIZES.block_keys)
    made = tl.where(is_second, SIZES.search.first, 0)
    keys = tl.load(row_ptr + numbers, mask=numbers < made, other=NO_KEY)
    best = tl.minimum(tl.min(keys, axis=0), identity) >> 32  # the identity, in the first wave
    gap = tl.where(is_second, tl.maximum(best - goal, 0), 0)
    key = identity * 0 + NO_KEY
    if best > goal:
        first_rank = domain * SIZES.domain_size
        num_ranks = tl.minimum(SIZES.domain_size, SIZES.num_ranks - first_rank)
        ranks, slots = every_32nd(SIZES.block_ranks), tl.arange(0, SIZES.block_slots)
        rank_ptr = attempts.ranks + (first_rank + ranks) * 2
        rank_load = tl.load(rank_ptr, mask=ranks < num_ranks, other=0)
        speeds = tl.load(rank_ptr + 1, mask=ranks < num_ranks, other=FULL)
        index = (domain * SIZES.num_attempts + number).to(tl.int64)
        left_ptr = attempts.left + index * (SIZES.domain_size * NUM_MASTERS)
        placed_ptr = attempts.placed + index * (SIZES.num_slots * SIZES.domain_size * 2)
        experts = tl.arange(0, SIZES.block_experts)
        mine = experts < num_ranks * NUM_MASTERS
        loads = tl.load(expert_load_ptr + first_rank * NUM_MASTERS + experts, mask=mine, other=0)
        tl.store(left_ptr + experts, loads, mask=mine)
        tl.debug_barrier()
        is_thrifty = number >= SIZES.search.limit
        near = (number - SIZES.search.limit) * goal // SIZES.search.grain
        above = tl.where(is_thrifty, near, gap * (number // 2 % 5) // 4)
        threshold = (goal + above).to(tl.int32)
        rank_load, held = attempt(
            threshold, number, speeds, rank_load, left_ptr, placed_ptr, num_ranks, SIZES
        )
        pair_ptr = placed_ptr + (slots[:, None] * SIZES.domain_size + ranks[None, :]) * 2
        exists = (slots < SIZES.num_slots)[:, None] & (ranks < num_ranks)[None, :]
        time = busiest(rank_load, speeds)
        if (time > goal) & (number < SIZES.search.limit):
            tl.store(pair_ptr, held, mask=exists)
            tl.debug_barrier()
            split = attempts.loads + index * SIZES.domain_size, left_ptr, placed_ptr
            SWEEPS: tl.constexpr = SIZES.search.sweeps
            ROOM: tl.constexpr = SIZES.domain_size
            BLOCK: tl.constexpr = SIZES.block_ranks
            rank_load = relax(speeds, rank_load, split, num_ranks, SWEEPS, ROOM, BLOCK, SIZES)
            time = busiest(rank_load, speeds)
            held = tl.where(tl.load(pair_ptr + 1, mask=exists, other=0) == 0, -1, held)
        sent, total = count_replicas(held, SIZES)
        key = (tl.maximum(time, goal) << 32) | (sent.to(tl.int64) << 16) | total
        key = tl.where(is_thrifty & (time > threshold), NO_KEY, key)
        received = tl.max(tl.sum((held >= 0).to(tl.int32), axis=0), axis=0)
        tl.store(attempts.reached + index * 2, time.to(tl.int32))
        tl.store(attempts.reached + index * 2 + 1, received)
        held = tl.where(held >= 0, held + first_rank * NUM_MASTERS, -1)
        tl.store(pair_ptr, held, mask=exists)
    tl.store(row_ptr + number, key)


@triton.jit
def _keep(given, attempts, found, kept, state_ptr, SIZES: tl.constexpr):
    """The program that splits the load over what is in slots, and looks for copies beside it."""
    turns_ptr = attempts.turns
    if given.rows is not None:
        forget_what_changed(given.rows, state_ptr, SIZES)
    if tl.load(found.decision) == PLANNED:
        rank_load, is_wanted, is_turn = split_residents(attempts, found, kept, state_ptr, SIZES)
        tl.store(kept.wanted, is_wanted.to(tl.int32))
        arrive(turns_ptr + _SPLIT)
        if is_wanted | is_turn:
            grow(rank_load, attempts, found, kept, state_ptr, SIZES)
        if is_wanted:
            arrive(turns_ptr + _GROWN)
        else:
            if is_turn:
                rank_load = split_again(attempts, found, kept, SIZES)
            time = busiest(rank_load, speeds_in(attempts, SIZES))
            decide(time, given.gate, attempts, found, kept, state_ptr, SIZES)
            arrive(turns_ptr + _DECIDED)


@triton.jit
def _is_wanted(decision_ptr, kept, turns_ptr):
    """Whether attempts are made."""
    wanted = peek(decision_ptr) == PLANNED  # who takes the winners may write it
    if kept is not None and wanted:
        await_arrivals(turns_ptr + _SPLIT, 1)
        wanted = tl.load(kept.wanted) != 0
    return wanted


@triton.jit
def search(turn, given, attempts, found, kept, state_ptr, SIZES: tl.constexpr):
    """A program adds up loads, or makes an attempt; and what comes next, where it is the last.

    Where copies stay one looks after them, and attempts are made where that wants new ones. The
    program's ``turn`` is below ``num_searched``.
    """
    KEEPERS: tl.constexpr = 0 if kept is None else 1
    turns_ptr = attempts.turns
    if turn < SIZES.num_sums:
        _add_up(given.loads, found.expert_load, turn, SIZES)
        if arrive(turns_ptr + _SUMMED) == SIZES.num_sums - 1:
            survey(given, attempts, found, SIZES)
            arrive(turns_ptr + _SURVEYED)
    elif turn < SIZES.num_sums + KEEPERS:
        await_arrivals(turns_ptr + _SURVEYED, 1)
        if kept is not None:
            _keep(given, attempts, found, kept, state_ptr, SIZES)
    elif SIZES.search.limit > 0:
        FIRST: tl.constexpr = SIZES.search.first
        LIMIT: tl.constexpr = SIZES.search.limit
        THRIFTY: tl.constexpr = SIZES.search.thrifty
        await_arrivals(turns_ptr + _SURVEYED, 1)
        first_wave: tl.constexpr = SIZES.num_domains * (FIRST + THRIFTY)
        index = turn - SIZES.num_sums - KEEPERS
        is_second = index >= first_wave
        # thrifty attempts are made with the first wave, and numbered after the second
        early = index % (FIRST + THRIFTY)
        early = tl.where(early < FIRST, early, early - FIRST + LIMIT)
        late = FIRST + (index - first_wave) % (LIMIT - FIRST)
        domain = tl.where(
            is_second, (index - first_wave) // (LIMIT - FIRST), index // (FIRST + THRIFTY)
        )
        if _is_wanted(found.decision, kept, turns_ptr):
            if is_second:
                await_arrivals(turns_ptr + _FIRST_WAVE, first_wave)
            number = tl.where(is_second, late, early)
            _attempt(domain, number, is_second, found.expert_load, attempts, SIZES)
            # where the first wave is enough, its last decides, and nobody waits for the second
            counter = tl.where(is_second, _ATTEMPTED, _FIRST_WAVE)
            size = tl.where(is_second, SIZES.num_domains * (LIMIT - FIRST), first_wave)
            if arrive(turns_ptr + counter) == size - 1:
                is_enough = is_reached(attempts, SIZES) != is_second
                if is_enough:
                    if kept is None:
                        take_winners(given.gate, attempts, found, SIZES)
                    else:
                        await_arrivals(turns_ptr + _GROWN, 1)
                        time = compare_fresh(attempts, found, kept, state_ptr, SIZES)
                        decide(time, given.gate, attempts, found, kept, state_ptr, SIZES)
                    arrive(turns_ptr + _DECIDED)


@triton.jit
def await_decision(decision_ptr, turns_ptr, HAS_ATTEMPTS: tl.constexpr):
    """What the search comes to, for programs behind it; a layer left alone is known earlier.

    Who takes the winners may write while it is read here.
    """
    await_arrivals(turns_ptr + _SURVEYED, 1)
    decision = peek(decision_ptr)
    if (decision == PLANNED) & HAS_ATTEMPTS:
        await_arrivals(turns_ptr + _DECIDED, 1)
        decision = tl.load(decision_ptr)
    return decision
