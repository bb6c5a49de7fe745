"""One attempt of the planner's search, by one program of one warp; all of its state in registers.

Twin: ``_attempt``, ``_relax`` and their helpers in ``host._plan_search``. Ranks and
experts are numbered within the domain. Choices are taken by two reductions, the largest weight and
then the lowest index that has it, because a warp reduces an int32 in one instruction.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._plan_times import LONGEST, capacities, time_of

__all__ = ["attempt", "count_replicas", "relax", "valid_total"]

_NOBODY = tl.constexpr(1 << 30)  # larger than any rank, expert or load


@triton.jit
def valid_total(expert_load):
    """Whether all loads are possible, and together few enough for what an attempt computes."""
    total = tl.sum(expert_load.to(tl.int64), axis=0)
    return (tl.min(expert_load, axis=0) >= 0) & (total <= LONGEST)


@triton.jit
def _weigh(size, seed, step, index):
    """``size`` times a factor in [1, 5), a hash of the other three numbers; times 1 for seed 0."""
    bits = seed.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x27D4EB2F
    bits = bits + index.to(tl.uint32) * 0x85EBCA77
    bits = bits ^ (bits >> 15)
    bits = bits * 0x2C1B3C6D
    weight = tl.where(seed == 0, 32, 32 + (bits >> 25).to(tl.int32))
    return ((size.to(tl.int64) * weight) >> 5).to(tl.int32)


@triton.jit
def _at(values, indices, index):
    """``values[index]`` as a scalar, 0 where there is no such index."""
    return tl.sum(tl.where(indices == index, values, 0), axis=0)


@triton.jit
def _at_slot(values, slots, ranks, slot, rank):
    """``values[slot, rank]`` as a scalar."""
    here = (slots[:, None] == slot) & (ranks[None, :] == rank)
    return tl.sum(tl.sum(tl.where(here, values, 0), axis=0), axis=0)


@triton.jit
def _pick_donor(room, ranks, seed, step):
    """The rank furthest above its capacity, _NOBODY if none is above."""
    over = _weigh(tl.maximum(-room, 0), seed, step, ranks)
    most = tl.max(over, axis=0)
    return tl.min(tl.where((over == most) & (over > 0), ranks, _NOBODY), axis=0)


@triton.jit
def attempt(
    threshold,  # a time
    tight,
    generous,
    seed,
    speeds,  # (R,) int32
    rank_load,  # (R,) int32; ranks that do not exist have none
    left,  # (E,) int32: assignments still on the master
    num_ranks,  # of the domain
    SIZES: tl.constexpr,  # PlanSizes
):
    """rank_load, left, held (S, R) experts or -1, and quotas (S, R) after one greedy pass."""
    ranks = tl.arange(0, SIZES.block_ranks)
    slots = tl.arange(0, SIZES.block_slots)
    experts = tl.arange(0, SIZES.block_experts)
    masters = tl.arange(0, SIZES.block_masters)
    held = tl.full((SIZES.block_slots, SIZES.block_ranks), -1, tl.int32)
    quotas = tl.full((SIZES.block_slots, SIZES.block_ranks), 0, tl.int32)
    filled = tl.where(ranks < num_ranks, 0, SIZES.num_slots)
    step = seed * 0
    room = capacities(threshold, speeds) - rank_load
    donor = _pick_donor(room, ranks, seed, step)
    while donor < _NOBODY:
        excess = -_at(room, ranks, donor)
        step += 1
        # of the donor's experts only, which are far fewer than all
        first = donor * SIZES.num_masters
        own = tl.gather(left, tl.minimum(first + masters, SIZES.block_experts - 1), axis=0)
        weighed = _weigh(own, seed, step, first + masters)
        weighed = tl.where(masters < SIZES.num_masters, weighed, -1)
        largest = tl.max(weighed, axis=0)
        chosen = tl.min(tl.where(weighed == largest, masters, _NOBODY), axis=0)
        expert = first + chosen

        holds = tl.max((held == expert).to(tl.int32), axis=0) > 0
        is_open = (room > 0) & (filled < SIZES.num_slots) & (holds == 0)
        fits = is_open & (room >= excess)
        use_fit = tight & (tl.max(fits.to(tl.int32), axis=0) > 0)
        emptiest = tl.where(is_open, _weigh(room, seed, step, ranks), 0)
        score = tl.where(use_fit, tl.where(fits, _NOBODY - room, 0), emptiest)
        best = tl.max(score, axis=0)
        found = best > 0
        target = tl.min(tl.where((score == best) & found, ranks, _NOBODY), axis=0)

        slot = _at(filled, ranks, target)
        amount = _at(room, ranks, target)
        capped = (slot < SIZES.num_slots - 1) | (_at(filled, ranks, donor) == SIZES.num_slots)
        capped = capped | (generous == 0)
        amount = tl.where(capped, tl.minimum(amount, excess), amount)
        amount = tl.minimum(amount, _at(own, masters, chosen))
        here = (slots[:, None] == slot) & (ranks[None, :] == target)
        held = tl.where(here, expert, held)
        quotas = tl.where(here, amount, quotas)
        filled += (ranks == target).to(tl.int32)
        left -= tl.where(experts == expert, amount, 0)
        room -= tl.where(ranks == target, amount, 0)
        room += tl.where(ranks == donor, amount, 0)
        if found == 0:  # the donor keeps what it has
            rank_load = capacities(threshold, speeds) - room
            load, speed = _at(rank_load, ranks, donor), _at(speeds, ranks, donor)
            threshold = time_of(load, speed).to(tl.int32)
            room = capacities(threshold, speeds) - rank_load
        donor = _pick_donor(room, ranks, seed, step)
    rank_load = capacities(threshold, speeds) - room
    return rank_load, left, held, quotas


@triton.jit
def relax(
    speeds,
    rank_load,
    left,
    held,
    quotas,
    num_ranks,
    SIZES: tl.constexpr,
):
    """Level each copy's rank with its master's in turn; ends after a sweep that moved nothing."""
    ranks = tl.arange(0, SIZES.block_ranks)
    slots = tl.arange(0, SIZES.block_slots)
    experts = tl.arange(0, SIZES.block_experts)
    exists = ranks < num_ranks
    fastest = tl.max(tl.where(exists, speeds, 0), axis=0)
    is_even = tl.min(tl.where(exists, speeds, fastest), axis=0) == fastest
    moved = num_ranks
    sweep = num_ranks * 0
    while (sweep < SIZES.search.sweeps) & (moved > 0):
        sweep += 1
        moved = num_ranks * 0
        for place in range(0, num_ranks * SIZES.num_slots):
            rank = place // SIZES.num_slots
            slot = place % SIZES.num_slots
            expert = _at_slot(held, slots, ranks, slot, rank)
            if expert >= 0:
                master = expert // SIZES.num_masters
                here = (slots[:, None] == slot) & (ranks[None, :] == rank)
                if is_even:
                    apart = tl.where(ranks == master, rank_load, 0)
                    apart -= tl.where(ranks == rank, rank_load, 0)
                    surplus = tl.sum(apart, axis=0).to(tl.int64)
                    most = (tl.abs(surplus) // 2).to(tl.int32)
                else:
                    sender, receiver = _at(speeds, ranks, master), _at(speeds, ranks, rank)
                    surplus = _at(rank_load, ranks, master).to(tl.int64) * receiver
                    surplus -= _at(rank_load, ranks, rank).to(tl.int64) * sender
                    most = (tl.abs(surplus) // (sender + receiver)).to(tl.int32)
                forth = tl.minimum(most, _at(left, experts, expert))
                back = tl.minimum(most, _at_slot(quotas, slots, ranks, slot, rank))
                amount = tl.where(surplus >= 0, forth, -back)
                quotas += tl.where(here, amount, 0)
                left -= tl.where(experts == expert, amount, 0)
                rank_load += tl.where(ranks == rank, amount, 0)
                rank_load -= tl.where(ranks == master, amount, 0)
                moved += tl.abs(amount)
    held = tl.where(quotas == 0, -1, held)
    return rank_load, held, quotas


@triton.jit
def count_replicas(held, SIZES: tl.constexpr):
    """(replicas sent by the busiest rank, replicas)."""
    flat = tl.reshape(held, (SIZES.block_slots * SIZES.block_ranks,))
    masters = tl.maximum(flat, 0) // SIZES.num_masters
    sent = tl.histogram(masters, SIZES.block_ranks, mask=flat >= 0)
    return tl.max(sent, axis=0), tl.sum(sent, axis=0)
