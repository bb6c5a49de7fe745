"""One attempt of the planner's search, by one program of one warp.

Twin: ``_attempt``, ``_relax`` and their helpers in ``host._plan_search``. Ranks and experts are
numbered within the domain. What a step needs of every rank is in registers, a few of each lane;
what is left on masters, and what slots compute, is in memory, where the lane that wrote a word is
the one that reads it, or a barrier lies between. Choices are taken by two reductions, the largest
weight and then the lowest index that has it, because a warp reduces an int32 in one instruction.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._plan_times import capacities, time_of
from ultraep_kernels.device.reroute import every_32nd

NOBODY = tl.constexpr(1 << 30)  # larger than any rank or expert
_FITS = tl.constexpr((1 << 31) - 1)  # less any room, larger than any weighed one


@triton.jit
def _weigh(size, seed, step, index):
    bits = seed.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x27D4EB2F
    bits = bits + index.to(tl.uint32) * 0x85EBCA77
    bits = bits ^ (bits >> 15)
    bits = bits * 0x2C1B3C6D
    weight = tl.where(seed == 0, 32, 32 + (bits >> 25).to(tl.int32))
    return ((size.to(tl.int64) * weight) >> 5).to(tl.int32)


@triton.jit
def at(values, indices, index):
    """``values[index]`` as a scalar, 0 where there is no such index."""
    return tl.sum(tl.where(indices == index, values, 0), axis=0)


@triton.jit
def _pick_donor(room, ranks, seed, step):
    over = _weigh(tl.maximum(-room, 0), seed, step, ranks)
    most = tl.max(over, axis=0)
    return tl.min(tl.where((over == most) & (over > 0), ranks, NOBODY), axis=0)


@triton.jit
def attempt(
    threshold,  # a time
    number,  # of the attempt; from LIMIT on it is thrifty
    speeds,  # (R,) int32
    rank_load,  # (R,) int32; ranks that do not exist have none
    left_ptr,  # (R * L,) int32: assignments still on the master; in and out
    placed_ptr,  # (S, R, 2) int32, out: the second of each pair, what the slot computes
    num_ranks,  # of the domain
    SIZES: tl.constexpr,  # PlanSizes
):
    """rank_load, and held (S, R) experts or -1, after one greedy pass."""
    ranks = every_32nd(SIZES.block_ranks)
    slots = tl.arange(0, SIZES.block_slots)
    masters = tl.arange(0, SIZES.block_masters)
    is_master = masters < SIZES.num_masters
    is_generous = number < SIZES.search.limit
    is_tight = is_generous & (number % 2 == 0)
    seed = tl.where(is_generous, number // 2, 0)
    held = tl.full((SIZES.block_slots, SIZES.block_ranks), -1, tl.int32)
    filled = tl.where(ranks < num_ranks, 0, SIZES.num_slots)
    step = seed * 0
    room = capacities(threshold, speeds) - rank_load
    donor = _pick_donor(room, ranks, seed, step)
    while donor < NOBODY:
        excess = -at(room, ranks, donor)
        step += 1
        first = donor * SIZES.num_masters
        own = tl.load(left_ptr + first + masters, mask=is_master, other=0)
        weighed = tl.where(is_master, _weigh(own, seed, step, first + masters), -1)
        largest = tl.max(weighed, axis=0)
        chosen = tl.min(tl.where(weighed == largest, masters, NOBODY), axis=0)

        holds = tl.max((held == first + chosen).to(tl.int32), axis=0) > 0
        is_open = (room > 0) & (filled < SIZES.num_slots) & (holds == 0)
        fits = is_tight & (room >= excess)
        score = tl.where(fits, _FITS - room, _weigh(room, seed, step, ranks))
        score = tl.where(is_open, score, 0)
        best = tl.max(score, axis=0)
        found = best > 0
        target = tl.min(tl.where((score == best) & found, ranks, NOBODY), axis=0)

        is_target = ranks == target
        slot = at(filled, ranks, target)
        amount = at(room, ranks, target)
        fills = is_generous & (slot == SIZES.num_slots - 1)
        fills = fills & (at(filled, ranks, donor) < SIZES.num_slots)
        amount = tl.where(fills, amount, tl.minimum(amount, excess))
        amount = tl.minimum(amount, at(own, masters, chosen))
        held = tl.where((slots == slot)[:, None] & is_target[None, :], first + chosen, held)
        tl.store(left_ptr + first + masters, own - amount, mask=masters == chosen)
        filled += is_target.to(tl.int32)
        room += tl.where(is_target, -amount, tl.where(ranks == donor, amount, 0))
        if found:
            tl.store(placed_ptr + (slot * SIZES.domain_size + target) * 2 + 1, amount)
        else:  # the donor keeps what it has
            rank_load = capacities(threshold, speeds) - room
            load, speed = at(rank_load, ranks, donor), at(speeds, ranks, donor)
            threshold = time_of(load, speed).to(tl.int32)
            room = capacities(threshold, speeds) - rank_load
        donor = _pick_donor(room, ranks, seed, step)
    return capacities(threshold, speeds) - room, held


@triton.jit
def relax(
    speeds,
    rank_load,
    split,  # (R,) int32, scratch; left; placed (S, R, 2) int32, experts and what they compute
    num_ranks,
    SWEEPS: tl.constexpr,  # at most
    ROOM: tl.constexpr,  # ranks that ``placed_ptr`` has room for
    BLOCK_RANKS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """rank_load after each copy's rank was levelled with its master's in turn, in several sweeps.

    They end after one that moved nothing.
    """
    load_ptr, left_ptr, placed_ptr = split
    ranks = every_32nd(BLOCK_RANKS)
    exists = ranks < num_ranks
    fastest = tl.max(tl.where(exists, speeds, 0), axis=0)
    is_even = fastest == tl.min(tl.where(exists, speeds, fastest), axis=0)
    tl.store(load_ptr + ranks, rank_load, mask=exists)
    tl.debug_barrier()
    moved = num_ranks
    sweep = num_ranks * 0
    while (sweep < SWEEPS) & (moved > 0):
        sweep += 1
        moved = num_ranks * 0
        for place in range(0, num_ranks * SIZES.num_slots):
            rank, slot = place // SIZES.num_slots, place % SIZES.num_slots
            here_ptr = placed_ptr + (slot * ROOM + rank) * 2
            expert = tl.load(here_ptr)
            if expert >= 0:
                master = expert // SIZES.num_masters
                own, quota = tl.load(left_ptr + expert), tl.load(here_ptr + 1)
                load, other = tl.load(load_ptr + master), tl.load(load_ptr + rank)
                together = load + other
                # the master's part of both loads, rounded down, and whether that left something
                level, rest = together >> 1, together & 1
                if not is_even:
                    speed = at(speeds, ranks, master)
                    both = (speed + at(speeds, ranks, rank)).to(tl.uint32)
                    part = together.to(tl.uint32) % both * speed.to(tl.uint32)
                    level = together.to(tl.uint32) // both * speed.to(tl.uint32) + part // both
                    level, rest = level.to(tl.int32), (part % both != 0).to(tl.int32)
                forth = tl.minimum(load - level - rest, own)
                amount = tl.where(load > level, forth, -tl.minimum(level - load, quota))
                tl.debug_barrier()  # all lanes have read
                tl.store(here_ptr + 1, quota + amount)
                tl.store(left_ptr + expert, own - amount)
                tl.store(load_ptr + master, load - amount)
                tl.store(load_ptr + rank, other + amount)
                tl.debug_barrier()
                moved += tl.abs(amount)
    return tl.load(load_ptr + ranks, mask=exists, other=0)


@triton.jit
def count_replicas(held, SIZES: tl.constexpr):
    """(replicas sent by the busiest rank, replicas)."""
    flat = tl.reshape(held, (SIZES.block_slots * SIZES.block_ranks,))
    masters = tl.maximum(flat, 0) // SIZES.num_masters
    sent = tl.histogram(masters, SIZES.block_ranks, mask=flat >= 0)
    return tl.max(sent, axis=0), tl.sum(sent, axis=0)
