"""New copies beside those that stay, tried one by one: from the busiest rank to one with room.

The load and its mirror are placed at once, and the rank that is late in the worse of them gives.
"""

import triton
import triton.language as tl

from ultraep_kernels import contract
from ultraep_kernels.device._plan_attempt import NOBODY, at
from ultraep_kernels.device._plan_decide import rank_loads
from ultraep_kernels.device._plan_level import level, speeds_in
from ultraep_kernels.device._plan_residents import (
    BEST,
    OTHER_GOAL,
    goal_of,
    split_over,
    total_cost,
)
from ultraep_kernels.device._plan_times import FULL, busiest
from ultraep_kernels.device.reroute import every_32nd

_SWEEPS = tl.constexpr(contract.STEP_SWEEPS)
_STEPS = tl.constexpr(contract.MOST_NEW_COPIES)
_FAR = tl.constexpr(1 << 62)  # more room than any rank has


@triton.jit
def grow(now_load, attempts, found, kept, state_ptr, SIZES: tl.constexpr):
    """Try new copies one by one; the best slots, and what is known of them, are in memory then."""
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    NUM_SLOTS: tl.constexpr = SIZES.num_slots
    NUM_WORDS: tl.constexpr = NUM_RANKS * NUM_SLOTS * 2
    ranks = every_32nd(SIZES.block_all_ranks)
    exists = ranks < NUM_RANKS
    speeds = speeds_in(attempts, SIZES)
    goal = tl.load(attempts.goal)
    home = rank_loads(kept.mirror, SIZES)
    other_goal = goal_of(home, speeds, SIZES)
    other_load = split_over(1, kept.mirror, home, other_goal, attempts, kept, kept.best, 1, SIZES)
    time, after = busiest(now_load, speeds), busiest(other_load, speeds)
    best = total_cost(time, after, kept, state_ptr, SIZES)
    step = tl.full((), 0, tl.int32)
    goes_on = best >= 0
    while goes_on & (step < _STEPS):
        step += 1
        worse = (time - goal < after - other_goal).to(tl.int32)
        left_ptr = kept.left + worse * SIZES.num_experts
        left_of_better = kept.left + (1 - worse) * SIZES.num_experts
        placed_ptr = kept.placed + worse * NUM_WORDS
        placed_of_better = kept.placed + (1 - worse) * NUM_WORDS
        rank_load = tl.where(worse == 1, other_load, now_load)
        whole = tl.where(worse == 1, other_goal, goal) * speeds // FULL
        room = tl.where(exists, whole - rank_load, _FAR)
        least = tl.min(room, axis=0)
        donor = tl.min(tl.where(room == least, ranks, NOBODY), axis=0)
        both = left_ptr, left_of_better, placed_ptr, placed_of_better
        expert = _pick_expert(donor, both, SIZES)
        target, slot = _pick_slot(expert, donor, room, whole, both, SIZES)
        goes_on = (least < 0) & (expert >= 0) & (target < NOBODY)
        if goes_on:
            here = slot, target
            now_load = _put(expert, here, now_load, kept.left, kept.placed, SIZES)
            second = kept.left + SIZES.num_experts, kept.placed + NUM_WORDS
            other_load = _put(expert, here, other_load, second[0], second[1], SIZES)
            now_load = level(0, now_load, attempts, goal, kept, _SWEEPS, SIZES)
            other_load = level(1, other_load, attempts, other_goal, kept, _SWEEPS, SIZES)
            time, after = busiest(now_load, speeds), busiest(other_load, speeds)
            cost = total_cost(time, after, kept, state_ptr, SIZES)
            if cost < best:
                index = tl.arange(0, SIZES.block_places)
                is_place = index < NUM_RANKS * NUM_SLOTS
                held = tl.load(kept.placed + index * 2, mask=is_place, other=-1)
                tl.store(kept.best + index, held, mask=is_place)
            best = tl.minimum(best, cost)
    tl.store(kept.words + BEST, best)
    tl.store(kept.words + OTHER_GOAL, other_goal)
    tl.debug_barrier()


@triton.jit
def _pick_expert(donor, both, SIZES: tl.constexpr):
    """What the donor computes most of, by master or slot, in both scenarios; -1 nothing.

    ``both``: what is left in the worse one and in the other, what is placed there.
    """
    left_ptr, left_of_better, placed_ptr, placed_of_better = both
    masters, slots = tl.arange(0, SIZES.block_masters), tl.arange(0, SIZES.block_slots)
    is_master, is_slot = masters < SIZES.num_masters, slots < SIZES.num_slots
    first = donor * SIZES.num_masters
    here = tl.load(left_ptr + first + masters, mask=is_master, other=0)
    there = tl.load(left_of_better + first + masters, mask=is_master, other=0)
    sizes = tl.where(here > 0, here + there, 0)
    most = tl.max(sizes, axis=0)
    chosen = tl.min(tl.where((sizes == most) & (most > 0), masters, NOBODY), axis=0)
    offsets = (slots * SIZES.num_ranks + donor) * 2
    here = tl.load(placed_ptr + offsets + 1, mask=is_slot, other=0)
    there = tl.load(placed_of_better + offsets + 1, mask=is_slot, other=0)
    sizes = tl.where(here > 0, here + there, 0)
    largest = tl.max(sizes, axis=0)
    slot = tl.min(tl.where((sizes == largest) & (largest > most), slots, NOBODY), axis=0)
    held = tl.load(placed_ptr + offsets, mask=slots == slot, other=0)
    expert = tl.where(most > 0, first + chosen, -1)
    return tl.where(largest > most, tl.sum(tl.where(slots == slot, held, 0), axis=0), expert)


@triton.jit
def _pick_slot(expert, donor, room, whole, both, SIZES: tl.constexpr):
    """Rank and slot with most ``room`` (R,) and least that would be missed; NOBODY: none has."""
    _, _, placed_ptr, placed_of_better = both
    ranks = every_32nd(SIZES.block_all_ranks)
    exists = ranks < SIZES.num_ranks
    home = tl.maximum(expert, 0) // SIZES.num_masters
    is_open = exists & (ranks // SIZES.domain_size == home // SIZES.domain_size) & (room > 0)
    is_open = is_open & (ranks != donor) & (ranks != home)
    score = tl.full((SIZES.block_all_ranks,), -_FAR, tl.int64)
    chosen, holds = ranks * 0, ranks * 0
    for slot in range(0, SIZES.num_slots):
        offsets = (slot * SIZES.num_ranks + ranks) * 2
        held = tl.load(placed_ptr + offsets, mask=exists, other=-1)
        here = tl.load(placed_ptr + offsets + 1, mask=exists, other=0)
        there = tl.load(placed_of_better + offsets + 1, mask=exists, other=0)
        missed = tl.maximum(here, there).to(tl.int64)
        left = room - 4 * missed
        is_better = (missed <= whole // 4) & (left > score)
        chosen = tl.where(is_better, slot, chosen)
        score = tl.where(is_better, left, score)
        holds |= (held == expert).to(tl.int32)
    score = tl.where(is_open & (holds == 0), score, -_FAR)
    most = tl.max(score, axis=0)
    target = tl.min(tl.where((score == most) & (most > -_FAR), ranks, NOBODY), axis=0)
    return target, at(chosen, ranks, target)


@triton.jit
def _put(expert, here, rank_load, left_ptr, placed_ptr, SIZES: tl.constexpr):
    slot, target = here
    ranks = every_32nd(SIZES.block_all_ranks)
    pair_ptr = placed_ptr + (slot * SIZES.num_ranks + target) * 2
    before, amount = tl.load(pair_ptr), tl.load(pair_ptr + 1)  # 0 where nothing is there
    before = tl.maximum(before, 0)
    left = tl.load(left_ptr + before)
    tl.debug_barrier()  # all lanes have read
    tl.store(left_ptr + before, left + amount)
    tl.store(pair_ptr, expert)
    tl.store(pair_ptr + 1, amount * 0)
    tl.debug_barrier()
    back = tl.where(ranks == before // SIZES.num_masters, amount, 0)
    return rank_load + back - tl.where(ranks == target, amount, 0)
