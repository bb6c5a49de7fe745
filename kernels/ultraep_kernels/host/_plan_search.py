"""expert loads (E,) -> which experts to copy where, and how much each copy takes; compiled.

One attempt is a greedy under a threshold: the rank with the largest excess over it exports from
its largest expert to a rank with room and a free slot, until no rank exceeds the threshold. A
target's last slot is filled to the threshold even where that takes more than the donor's excess:
the donor's own slots are still free to make good for it, the target's are not. With one expert per
rank that is Walker's alias method (1974), which balances perfectly with one slot per rank.

The search repeats the attempt, each time with other pseudo-random weights on its choices, and keeps
the plan with the smallest (largest rank load, replicas sent by the busiest rank, replicas). It has
two waves: the first tries to reach the goal itself; only if that fails, the second tries thresholds
between the goal and the best load found, until one attempt reaches the goal. Attempts of a wave do
not depend on each other, so a GPU makes them at the same time (twins: ``device._plan_search``,
``device._plan_attempt``).
Everything is integer and seeded by the attempt's number, so every rank finds the same plan.
"""

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import IntArray
from ultraep_kernels.host._compile import compiled

__all__ = ["place_replicas"]

Counts = NDArray[np.int64]


@compiled
def place_replicas(
    expert_load: Counts,
    num_ranks: int,
    num_slots: int,
    domain_size: int,
    grain: int,
    first_wave: int,
    limit: int,
    sweeps: int,
) -> tuple[IntArray, Counts]:
    """Place replicas for every domain.

    Args:
        expert_load: int64 (E,), assignments per logical expert.
        num_ranks: R.
        num_slots: S.
        domain_size: ranks per domain; the last domain may be smaller.
        grain, first_wave, limit, sweeps: as in ``contract.Search``.

    Returns:
        slot_expert int32 (R, S), -1 empty, and slot_quota int64 (R, S), what each slot computes.
    """
    num_masters = expert_load.size // num_ranks
    rank_load = np.zeros(num_ranks, np.int64)
    for expert in range(expert_load.size):
        rank_load[expert // num_masters] += expert_load[expert]
    slot_expert = np.full((num_ranks, num_slots), -1, np.int32)
    slot_quota = np.zeros((num_ranks, num_slots), np.int64)
    if num_slots == 0:
        return slot_expert, slot_quota
    goal = 0  # no domain need be better than the best that the busiest one can reach
    for first in range(0, num_ranks, domain_size):
        members = rank_load[first : first + domain_size]
        goal = max(goal, -(-members.sum() // members.size))
    goal += (goal + grain // 2) // grain
    for first in range(0, num_ranks, domain_size):
        last = min(first + domain_size, num_ranks)
        owned = expert_load[first * num_masters : last * num_masters]
        slots, quotas = slot_expert[first:last], slot_quota[first:last]
        if rank_load[first:last].max() > goal:
            load = rank_load[first:last]
            _search(goal, first_wave, limit, sweeps, load, owned, slots, quotas)
            for rank in range(last - first):
                for slot in range(num_slots):
                    if slots[rank, slot] >= 0:
                        slots[rank, slot] += first * num_masters
    return slot_expert, slot_quota


@compiled
def _search(
    goal: int,
    first_wave: int,
    limit: int,
    sweeps: int,
    rank_load: Counts,
    expert_load: Counts,
    best_slots: IntArray,
    best_quotas: Counts,
) -> None:
    """Attempt after attempt in one domain; the best one's slots stay in ``best_slots``."""
    num_masters = expert_load.size // rank_load.size
    num_donors = (rank_load > goal).sum()
    slots, quotas = best_slots.copy(), best_quotas.copy()
    loads, left = rank_load.copy(), expert_load.copy()
    best = (rank_load.max(), 0, 0)
    gap = 0  # between the goal and what the first wave reached
    for attempt in range(limit):
        if attempt >= first_wave and best[0] <= goal:
            break
        if attempt == first_wave:
            gap = best[0] - goal
        threshold = goal + gap * (attempt // 2 % 5) // 4
        loads[:] = rank_load
        left[:] = expert_load
        _attempt(threshold, attempt % 2 == 0, attempt // 2, loads, left, slots, quotas)
        if loads.max() > goal:
            _relax(num_masters, sweeps, loads, left, slots, quotas)
        sent, total = _count_replicas(slots, num_masters)
        found = (max(loads.max(), goal), sent, total)
        if found < best:
            best = found
            best_slots[:] = slots
            best_quotas[:] = quotas
            if best[0] <= goal and total == num_donors:
                break  # every donor sends once: nothing can be better


@compiled
def _attempt(
    threshold: int,
    tight: bool,
    seed: int,
    rank_load: Counts,
    left: Counts,
    slots: IntArray,
    quotas: Counts,
) -> None:
    """One greedy pass over one domain; expert numbers are the domain's own.

    Args:
        threshold: load above which a rank must export; rises where a rank finds no target.
        tight: prefer the target that a donor's excess just fits, else the emptiest target.
        seed: 0 takes every choice by size, others weigh the sizes pseudo-randomly.
        rank_load: (R,) assignments per rank, updated.
        left: (E,) assignments still on the master, updated.
        slots, quotas: (R, S), overwritten.
    """
    num_slots = slots.shape[1]
    slots[:] = -1
    quotas[:] = 0
    step = 0
    while True:
        donor = _pick_donor(rank_load, threshold, seed, step)
        if donor < 0:
            return
        step += 1
        expert = _pick_expert(left, donor, left.size // rank_load.size, seed, step)
        excess = rank_load[donor] - threshold
        target = _pick_target(rank_load, slots, threshold, expert, excess, tight, seed, step)
        if target < 0:
            threshold = rank_load[donor]
            continue
        slot = 0
        while slots[target, slot] >= 0:
            slot += 1
        amount = threshold - rank_load[target]
        if slot < num_slots - 1 or slots[donor, num_slots - 1] >= 0:
            amount = min(amount, excess)
        amount = min(amount, left[expert])
        slots[target, slot] = expert
        quotas[target, slot] = amount
        left[expert] -= amount
        rank_load[donor] -= amount
        rank_load[target] += amount


@compiled
def _relax(
    num_masters: int,
    sweeps: int,
    rank_load: Counts,
    left: Counts,
    slots: IntArray,
    quotas: Counts,
) -> None:
    """Level each copy's rank with its master's in turn; never raises the larger of the two."""
    for _ in range(sweeps):
        for rank in range(slots.shape[0]):
            for slot in range(slots.shape[1]):
                expert = slots[rank, slot]
                if expert < 0:
                    continue
                master = expert // num_masters
                surplus = rank_load[master] - rank_load[rank]
                amount = min(surplus // 2, left[expert])
                if surplus < 0:
                    amount = -min(-surplus // 2, quotas[rank, slot])
                quotas[rank, slot] += amount
                left[expert] -= amount
                rank_load[master] -= amount
                rank_load[rank] += amount
    for rank in range(slots.shape[0]):
        for slot in range(slots.shape[1]):
            if quotas[rank, slot] == 0:
                slots[rank, slot] = -1


@compiled
def _pick_donor(rank_load: Counts, threshold: int, seed: int, step: int) -> int:
    """The rank furthest above the threshold, -1 if none is above."""
    donor, most = -1, 0
    for rank in range(rank_load.size):
        excess = rank_load[rank] - threshold
        if excess > 0:
            weighted = _weigh(excess, seed, step, rank)
            if weighted > most:
                donor, most = rank, weighted
    return donor


@compiled
def _pick_expert(left: Counts, donor: int, num_masters: int, seed: int, step: int) -> int:
    """The donor's expert with most left on its master."""
    expert, most = -1, -1
    for other in range(donor * num_masters, (donor + 1) * num_masters):
        weighted = _weigh(left[other], seed, step, other)
        if weighted > most:
            expert, most = other, weighted
    return expert


@compiled
def _pick_target(
    rank_load: Counts,
    slots: IntArray,
    threshold: int,
    expert: int,
    excess: int,
    tight: bool,
    seed: int,
    step: int,
) -> int:
    """A rank with room, a free slot and no copy of ``expert``, -1 if there is none."""
    num_slots = slots.shape[1]
    target, most = -1, 0
    fitting, least = -1, 0
    for rank in range(rank_load.size):
        room = threshold - rank_load[rank]
        if room <= 0 or slots[rank, num_slots - 1] >= 0 or _holds(slots, rank, expert):
            continue
        weighted = _weigh(room, seed, step, rank)
        if weighted > most:
            target, most = rank, weighted
        if room >= excess and (fitting < 0 or room < least):
            fitting, least = rank, room
    return fitting if tight and fitting >= 0 else target


@compiled
def _holds(slots: IntArray, rank: int, expert: int) -> bool:
    slot = 0  # slots fill in order
    while slot < slots.shape[1] and slots[rank, slot] >= 0:
        if slots[rank, slot] == expert:
            return True
        slot += 1
    return False


@compiled
def _weigh(size: int, seed: int, step: int, index: int) -> int:
    """``size`` times a factor in [1, 5), a hash of the other three numbers; times 1 for seed 0."""
    if seed == 0:
        return size
    bits = (seed * 0x9E3779B1 + step * 0x27D4EB2F + index * 0x85EBCA77) & 0xFFFFFFFF
    bits ^= bits >> 15
    bits = (bits * 0x2C1B3C6D) & 0xFFFFFFFF
    return (size * (32 + (bits >> 25))) >> 5


@compiled
def _count_replicas(slots: IntArray, num_masters: int) -> tuple[int, int]:
    """(replicas sent by the busiest rank, replicas)."""
    sent = np.zeros(slots.shape[0], np.int64)
    total = 0
    for rank in range(slots.shape[0]):
        for slot in range(slots.shape[1]):
            if slots[rank, slot] >= 0:
                sent[slots[rank, slot] // num_masters] += 1
                total += 1
    return sent.max(), total
