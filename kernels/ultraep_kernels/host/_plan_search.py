"""expert loads (E,) and speeds (R,) -> which experts to copy where, what each computes; compiled.

One attempt is a greedy under a threshold, a time that gives every rank a capacity: what it computes
by then at its speed. The rank with the largest excess over its capacity exports from its largest
expert to a rank with room and a free slot, until no rank has excess. A target's last slot is filled
to the capacity even where that takes more than the donor's excess: the donor's own slots are still
free to make good for it, the target's are not. With one expert per rank that is Walker's alias
method (1974), which balances perfectly with one slot per rank.

The search repeats the attempt, each time with other pseudo-random weights on its choices, and keeps
the plan with the smallest (busiest rank's time, replicas sent by one rank, replicas). It has
two waves: the first tries to reach the goal itself; only if that fails, the second tries thresholds
between the goal and the best time found, until one attempt reaches the goal. Last come thrifty
attempts, which move no more than an excess: one that balances almost as well with fewer replicas,
and without a busier sender, is taken instead. Attempts of a wave do not depend on each other, so a
GPU makes them at the same time (twins: ``device._plan_search``, ``device._plan_attempt``).
Everything is integer and seeded by the attempt's number, so every rank finds the same plan.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import FULL_SPEED, IntArray, Search
from ultraep_kernels.host._compile import compiled

Counts = NDArray[np.int64]


class _Domain(NamedTuple):
    """What is to be balanced: D ranks, the experts E that they own, numbered from 0."""

    speeds: Counts  # (D,), each 1 to FULL_SPEED
    rank_load: Counts  # (D,) assignments with every expert on its master
    expert_load: Counts  # (E,) assignments


class Placement(NamedTuple):
    """Where replicas are, and how the load is split."""

    rank_load: Counts  # (D,) assignments
    left: Counts  # (E,) assignments still on the master
    slots: IntArray  # (D, S), -1 empty
    quotas: Counts  # (D, S) assignments of each slot


@compiled
def place_replicas(
    expert_load: Counts, speeds: Counts, num_slots: int, domain_size: int, search: Search
) -> tuple[IntArray, Counts]:
    """Place replicas for every domain of ``domain_size`` ranks, of which the last may be smaller.

    ``expert_load`` (E,) assignments; of ``speeds`` (R,), each 1 to FULL_SPEED, only ratios matter.
    Returns slot_expert int32 (R, S), -1 empty, and slot_quota int64 (R, S), what each computes.
    """
    num_ranks = speeds.size
    num_masters = expert_load.size // num_ranks
    speeds = (speeds * FULL_SPEED + speeds.max() // 2) // speeds.max()
    rank_load = np.zeros(num_ranks, np.int64)
    for expert in range(expert_load.size):
        rank_load[expert // num_masters] += expert_load[expert]
    slot_expert = np.full((num_ranks, num_slots), -1, np.int32)
    slot_quota = np.zeros((num_ranks, num_slots), np.int64)
    if num_slots == 0:
        return slot_expert, slot_quota
    goal = least_time(rank_load, speeds, domain_size)
    goal += (goal + search.grain // 2) // search.grain
    for first in range(0, num_ranks, domain_size):
        last = min(first + domain_size, num_ranks)
        owned = expert_load[first * num_masters : last * num_masters]
        domain = _Domain(speeds[first:last], rank_load[first:last], owned)
        slots, quotas = slot_expert[first:last], slot_quota[first:last]
        if busiest_time(domain.rank_load, domain.speeds) > goal:
            best = _search(goal, search, domain, slots, quotas)
            _save(best, goal, search, domain, slots, quotas)
            for rank in range(last - first):
                for slot in range(num_slots):
                    if slots[rank, slot] >= 0:
                        slots[rank, slot] += first * num_masters
    return slot_expert, slot_quota


@compiled
def busiest_time(rank_load: Counts, speeds: Counts) -> int:
    """The least time by which every rank computes its assignments, as ``least_time`` counts it.

    ``rank_load``, ``speeds`` int64 (R,), each speed 1 to FULL_SPEED.
    """
    time = 0
    for rank in range(rank_load.size):
        if time * speeds[rank] < rank_load[rank] * FULL_SPEED:
            time = _time(rank_load[rank], speeds[rank])
    return time


@compiled
def least_time(rank_load: Counts, speeds: Counts, domain_size: int) -> int:
    """The least time by which every domain's ranks together can compute the domain's loads.

    ``rank_load`` and ``speeds`` as in ``busiest_time``. It is a number of assignments at
    FULL_SPEED; no domain need be faster than the one that takes longest.
    """
    time = 0
    for first in range(0, rank_load.size, domain_size):
        members = speeds[first : first + domain_size]
        total = rank_load[first : first + domain_size].sum()
        low = -(-total * FULL_SPEED // members.sum())
        high = low + -(-members.size * FULL_SPEED // members.sum())
        while low < high:  # every rank may lack a part of an assignment
            middle = (low + high) // 2
            if capacities(middle, members).sum() < total:
                low = middle + 1
            else:
                high = middle
        time = max(time, high)
    return time


@compiled
def _search(
    goal: int, search: Search, domain: _Domain, best_slots: IntArray, best_quotas: Counts
) -> tuple[int, int, int]:
    """Both waves in one domain; the best attempt's slots and quotas (D, S) are kept.

    Returns:
        Its (busiest rank's time, replicas sent by one rank, replicas).
    """
    num_masters = domain.expert_load.size // domain.rank_load.size
    num_donors = (domain.rank_load > capacities(goal, domain.speeds)).sum()
    made = _empty_placement(domain, best_slots)
    best = (busiest_time(domain.rank_load, domain.speeds), 0, 0)
    gap = 0  # between the goal and what the first wave reached
    for attempt in range(search.limit):
        if attempt >= search.first and best[0] <= goal:
            break
        if attempt == search.first:
            gap = best[0] - goal
        threshold = goal + gap * (attempt // 2 % 5) // 4
        _attempt(threshold, attempt % 2 == 0, bool(1), attempt // 2, domain, made)
        time = busiest_time(made.rank_load, domain.speeds)
        if time > goal:
            _relax(search.sweeps, domain.speeds, made)
            time = busiest_time(made.rank_load, domain.speeds)
        sent, total = _count_replicas(made.slots, num_masters)
        found = (max(time, goal), sent, total)
        if found < best:
            best = found
            best_slots[:] = made.slots
            best_quotas[:] = made.quotas
            if best[0] <= goal and total == num_donors:
                break  # every donor sends once: nothing can be better
    return best


@compiled
def _save(
    best: tuple[int, int, int],
    goal: int,
    search: Search,
    domain: _Domain,
    best_slots: IntArray,
    best_quotas: Counts,
) -> None:
    """Thrifty attempts in one domain, with thresholds that rise by 1/grain.

    The first that keeps within its threshold replaces ``best``, what the search found, where it
    needs fewer replicas, without a busier sender.
    """
    num_masters = domain.expert_load.size // domain.rank_load.size
    made = _empty_placement(domain, best_slots)
    for attempt in range(search.thrifty):
        threshold = goal + attempt * goal // search.grain
        _attempt(threshold, bool(0), bool(0), int(False), domain, made)
        if busiest_time(made.rank_load, domain.speeds) <= threshold:
            sent, total = _count_replicas(made.slots, num_masters)
            if 0 < total < best[2] and sent <= best[1]:
                best_slots[:] = made.slots
                best_quotas[:] = made.quotas
            return


@compiled
def _empty_placement(domain: _Domain, slots: IntArray) -> Placement:
    """Room for an attempt with as many ``slots`` (D, S)."""
    quotas = np.empty(slots.shape, np.int64)
    return Placement(domain.rank_load.copy(), domain.expert_load.copy(), slots.copy(), quotas)


@compiled
def _attempt(
    threshold: int, tight: bool, generous: bool, seed: int, domain: _Domain, made: Placement
) -> None:
    """One greedy pass over one domain.

    Args:
        threshold: time after which no rank should compute; rises where a rank finds no target.
        tight: prefer the target that a donor's excess just fits, else the emptiest target.
        generous: fill a target's last slot, and rise; else the pass ends where a rank finds none.
        seed: 0 takes every choice by size, others weigh the sizes pseudo-randomly.
        domain: to be balanced.
        made: overwritten.
    """
    speeds, (rank_load, left, slots, quotas) = domain.speeds, made
    rank_load[:] = domain.rank_load
    left[:] = domain.expert_load
    slots[:] = -1
    quotas[:] = 0
    num_slots = slots.shape[1]
    room = capacities(threshold, speeds) - rank_load
    step = int(False)
    while True:
        donor = _pick_donor(room, seed, step)
        if donor < 0:
            return
        step += 1
        expert = _pick_expert(left, donor, left.size // room.size, seed, step)
        excess = -room[donor]
        target = _pick_target(room, slots, expert, excess, tight, seed, step)
        if target < 0:
            if not generous:
                return  # nobody takes what is above the threshold
            threshold = _time(rank_load[donor], speeds[donor])
            room[:] = capacities(threshold, speeds) - rank_load
            continue
        slot = 0
        while slots[target, slot] >= 0:
            slot += 1
        amount = room[target]
        if not generous or slot < num_slots - 1 or slots[donor, num_slots - 1] >= 0:
            amount = min(amount, excess)
        amount = min(amount, left[expert])
        slots[target, slot] = expert
        quotas[target, slot] = amount
        left[expert] -= amount
        rank_load[donor] -= amount
        rank_load[target] += amount
        room[donor] += amount
        room[target] -= amount


@compiled
def _relax(sweeps: int, speeds: Counts, made: Placement) -> None:
    """Level each copy's rank with its master's in turn; idle copies go.

    Never raises the longer of their times.
    """
    rank_load, left, slots, quotas = made
    num_masters = left.size // rank_load.size
    for _ in range(sweeps):
        for rank in range(slots.shape[0]):
            for slot in range(slots.shape[1]):
                expert = slots[rank, slot]
                if expert < 0:
                    continue
                master = expert // num_masters
                surplus = rank_load[master] * speeds[rank] - rank_load[rank] * speeds[master]
                most = left[expert] if surplus > 0 else quotas[rank, slot]
                if most == 0:
                    continue  # most are: a division takes longer than all the rest
                amount = min(abs(surplus) // (speeds[master] + speeds[rank]), most)
                if surplus < 0:
                    amount = -amount
                quotas[rank, slot] += amount
                left[expert] -= amount
                rank_load[master] -= amount
                rank_load[rank] += amount
    for rank in range(slots.shape[0]):
        for slot in range(slots.shape[1]):
            if quotas[rank, slot] == 0:
                slots[rank, slot] = -1


@compiled
def capacities(time: int, speeds: Counts) -> Counts:
    """int64 (R,) assignments that ranks with ``speeds`` (R,) compute by ``time``."""
    return time * speeds // FULL_SPEED


@compiled
def _time(load: int, speed: int) -> int:
    """The least time by which a rank with ``speed`` computes ``load`` assignments."""
    return -(-load * FULL_SPEED // speed)


@compiled
def _pick_donor(room: Counts, seed: int, step: int) -> int:
    donor, most = -1, 0
    for rank in range(room.size):
        if room[rank] < 0:
            weighted = _weigh(-room[rank], seed, step, rank)
            if weighted > most:
                donor, most = rank, weighted
    return donor


@compiled
def _pick_expert(left: Counts, donor: int, num_masters: int, seed: int, step: int) -> int:
    expert, most = -1, -1
    for other in range(donor * num_masters, (donor + 1) * num_masters):
        weighted = _weigh(left[other], seed, step, other)
        if weighted > most:
            expert, most = other, weighted
    return expert


@compiled
def _pick_target(
    room: Counts, slots: IntArray, expert: int, excess: int, tight: bool, seed: int, step: int
) -> int:
    """A rank with room, a free slot and no copy of ``expert``, -1 if there is none."""
    num_slots = slots.shape[1]
    target, most = -1, 0
    fitting, least = -1, 0
    for rank in range(room.size):
        if room[rank] <= 0 or slots[rank, num_slots - 1] >= 0 or holds(slots, rank, expert):
            continue
        weighted = _weigh(room[rank], seed, step, rank)
        if weighted > most:
            target, most = rank, weighted
        if room[rank] >= excess and (fitting < 0 or room[rank] < least):
            fitting, least = rank, room[rank]
    return fitting if tight and fitting >= 0 else target


@compiled
def holds(slots: IntArray, rank: int, expert: int) -> bool:
    """Whether one of the ``slots`` (R, S) of ``rank`` has ``expert``."""
    found = False
    for slot in range(slots.shape[1]):
        found |= bool(slots[rank, slot] == expert)
    return found


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
