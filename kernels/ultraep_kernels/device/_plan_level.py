"""Copies' ranks levelled with their masters', those of one slot of all ranks at once.

A lane has a rank. Sums are of integers, by atomic operations, whose order does not matter. Twin:
``_level`` in ``host._plan_residents``, which says how much is moved.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import PROGRESS_SHIFT
from ultraep_kernels.device._plan_times import FULL, busiest
from ultraep_kernels.device.reroute import every_32nd

_PROGRESS = tl.constexpr(PROGRESS_SHIFT)


@triton.jit
def level(
    number,  # of the scenario: 0 the load, 1 its mirror
    rank_load,  # (R,) int32
    attempts,  # Attempts, for the speeds
    goal,  # a time
    kept,  # Kept: what is left and placed changes
    SWEEPS: tl.constexpr,  # at most
    SIZES: tl.constexpr,
):
    """rank_load (R,) after sweeps, which end at the goal or where one gains little of it."""
    left_ptr = kept.left + number * SIZES.num_experts
    placed_ptr = kept.placed + number * (2 * SIZES.num_ranks * SIZES.num_slots)
    load_ptr = kept.loads + number * SIZES.num_ranks
    ranks = every_32nd(SIZES.block_all_ranks)
    exists = ranks < SIZES.num_ranks
    speeds = speeds_in(attempts, SIZES)
    fastest = tl.max(tl.where(exists, speeds, 0), axis=0)
    is_even = fastest == tl.min(tl.where(exists, speeds, fastest), axis=0)
    weights = tl.where(is_even, 1, speeds)
    tl.store(load_ptr + ranks, rank_load, mask=exists)
    tl.debug_barrier()
    time = busiest(rank_load, speeds)
    least = goal >> _PROGRESS
    gained = time * 0 + least
    sweep = tl.full((), 0, tl.int32)
    while (sweep < SWEEPS) & (time > goal) & (gained >= least):
        sweep += 1
        for slot in range(0, SIZES.num_slots):
            tl.store(kept.pulled + ranks, ranks * 0, mask=exists)
            tl.store(kept.given + ranks, ranks * 0, mask=exists)
            pair_ptr = placed_ptr + (slot * SIZES.num_ranks + ranks) * 2
            expert = tl.load(pair_ptr, mask=exists, other=-1)
            has = expert >= 0
            expert = tl.maximum(expert, 0)
            master = expert // SIZES.num_masters
            quota = tl.load(pair_ptr + 1, mask=has, other=0)
            own = tl.load(left_ptr + expert, mask=has, other=0)
            here = tl.load(load_ptr + ranks, mask=has, other=0)
            there = tl.load(load_ptr + master, mask=has, other=0)
            weight = tl.load(attempts.ranks + master * 2 + 1, mask=has, other=1)
            weight = tl.where(is_even, 1, weight)
            surplus = there.to(tl.int64) * weights - here.to(tl.int64) * weight
            gives = surplus > 0
            most = tl.where(gives, own, quota)
            moves = has & (most > 0)
            tl.debug_barrier()
            for_master = kept.pulled + master
            tl.atomic_add(for_master, weights, mask=moves, sem="relaxed", scope="cta")
            tl.atomic_add(kept.pulled + ranks, weight, mask=moves, sem="relaxed", scope="cta")
            is_given = kept.given + master
            tl.atomic_add(is_given, ranks * 0 + 1, mask=moves & gives, sem="relaxed", scope="cta")
            tl.debug_barrier()
            both = tl.load(for_master, mask=moves, other=0) - tl.minimum(weights, weight)
            both += tl.load(kept.pulled + ranks, mask=moves, other=0)
            both = tl.maximum(both, weights + weight)
            if is_even:
                amount = (tl.abs(surplus).to(tl.uint32) // both.to(tl.uint32)).to(tl.int32)
            else:
                amount = (tl.abs(surplus) // both).to(tl.int32)
            shared = tl.load(is_given, mask=moves & gives, other=1).to(tl.uint32)
            most = (most.to(tl.uint32) // tl.maximum(shared, 1)).to(tl.int32)
            amount = tl.minimum(amount, most)
            amount = tl.where(moves, tl.where(gives, amount, -amount), 0)
            tl.store(pair_ptr + 1, quota + amount, mask=has)
            tl.atomic_add(left_ptr + expert, -amount, mask=moves, sem="relaxed", scope="cta")
            tl.atomic_add(load_ptr + master, -amount, mask=moves, sem="relaxed", scope="cta")
            tl.atomic_add(load_ptr + ranks, amount, mask=moves, sem="relaxed", scope="cta")
            tl.debug_barrier()
        before = time
        time = busiest(tl.load(load_ptr + ranks, mask=exists, other=0), speeds)
        gained = before - time
    return tl.load(load_ptr + ranks, mask=exists, other=0)


@triton.jit
def speeds_in(attempts, SIZES: tl.constexpr):
    """(R,) int32; FULL_SPEED where there is no rank."""
    ranks = every_32nd(SIZES.block_all_ranks)
    return tl.load(attempts.ranks + ranks * 2 + 1, mask=ranks < SIZES.num_ranks, other=FULL)
