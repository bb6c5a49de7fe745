"""expert loads (E,), residents (R, S) -> what slots hold and compute, few new copies; compiled.

Residents are what a layer's slots hold from the batches before. Their experts' load is split anew:
copies' ranks are levelled with their masters', one slot of all ranks at a time, which a device does
at once, until the busiest rank is at the goal. Where that is not enough, new copies are tried, one
after the other, each from the busiest rank into the slot that is missed least.

A copy that one odd batch wants makes the next ones worse, so placements are compared by what they
cost this batch and so many that follow, half of them like this one, half like its mirror: what is
left of the average if this batch's load is taken from twice of it. Where two kinds of traffic take
turns, the mirror of the one is the other. A fresh plan, of which copies that are there already keep
their slots, is compared where it could save more than a copy costs. Everything is integer, so every
rank finds the same. Twin: ``device._plan_residents``.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels import contract
from ultraep_kernels.contract import FULL_SPEED, IntArray, Prices, Search
from ultraep_kernels.host._compile import compiled
from ultraep_kernels.host._plan_search import (
    Placement,
    busiest_time,
    capacities,
    holds,
    least_time,
    place_replicas,
)

Counts = NDArray[np.int64]


class _Group(NamedTuple):
    speeds: Counts  # (R,), the fastest at FULL_SPEED
    domain_size: int
    grain: int
    residents: IntArray  # (R, S) before this batch
    num_masters: int  # of a rank
    prices: Prices


class _Scenario(NamedTuple):
    goal: int  # a time
    split: Placement


@compiled
def keep_replicas(
    expert_load: Counts,
    stayed: tuple[Counts, IntArray],
    speeds: Counts,
    domain_size: int,
    prices: Prices,
    is_turn: bool,
    search: Search,
) -> tuple[IntArray, Counts]:
    """What slots hold from this batch on, and compute in it; others as for ``place_replicas``.

    ``stayed``: the average load (E,) of the batches so far, this one among them, times
    2**AVERAGE_SHIFT, and the residents (R, S), experts in the slots, -1 none. ``prices`` say what a
    new copy costs, ``is_turn`` whether some are tried though this batch would not pay for any.
    Returns int32 (R, S), the experts in the slots, and int64 (R, S), what each computes, often 0.
    """
    average, residents = stayed
    speeds = (speeds * FULL_SPEED + speeds.max() // 2) // speeds.max()
    num_masters = expert_load.size // speeds.size
    group = _Group(speeds, domain_size, search.grain, residents, num_masters, prices)
    now = _scenario(expert_load, residents, group)
    time = busiest_time(now.split.rank_load, speeds)
    wants = _cost(time, prices) - _cost(now.goal, prices) > prices.copy
    if not wants and not is_turn:
        return now.split.slots, now.split.quotas
    mirror = np.maximum(2 * (average >> contract.AVERAGE_SHIFT) - expert_load, 0)
    other = _scenario(mirror, residents, group)
    batches = contract.LATER_BATCHES if is_turn else contract.SOON_BATCHES
    best, slots = _grow(now, other, batches, group)
    both = _cost(now.goal, prices) + _cost(other.goal, prices)
    least = 2 * _cost(now.goal, prices) + 2 * prices.copy + batches * both  # with one new copy
    if wants and best - least > 2 * prices.copy:
        fresh, quotas = place_replicas(expert_load, speeds, residents.shape[1], domain_size, search)
        merged = _merged(fresh, residents)
        quotas = _moved(quotas, fresh, merged)
        busiest = busiest_time(_rank_load(expert_load, merged, quotas), speeds)
        after = busiest_time(_scenario(mirror, merged, group).split.rank_load, speeds)
        if _total(busiest, after, merged, batches, group) < best:
            return merged, quotas
    split = _scenario(expert_load, slots, group).split
    return split.slots, split.quotas


@compiled
def _scenario(expert_load: Counts, slots: IntArray, group: _Group) -> _Scenario:
    """``expert_load`` (E,) split over masters and what is in ``slots`` (R, S)."""
    quotas = np.zeros(slots.shape, np.int64)
    rank_load = _rank_load(expert_load, slots, quotas)
    goal = least_time(rank_load, group.speeds, group.domain_size)
    goal += (goal + group.grain // 2) // group.grain
    split = Placement(rank_load, expert_load.copy(), slots.copy(), quotas)
    _level(contract.SPLIT_SWEEPS, goal, group.speeds, split)
    return _Scenario(goal, split)


@compiled
def _level(sweeps: int, goal: int, speeds: Counts, split: Placement) -> None:
    """Level copies' ranks with their masters', those of one slot of all ranks at once.

    Two ranks are levelled by less where others are levelled with them too: the difference of their
    times by the speeds of all others of either, less the slower's. So no rank ends above the
    longest time of those, and the busiest rank's time never rises. Ends before all ``sweeps``
    where that is at the ``goal``, and after one that lowered it by little of the goal.
    """
    rank_load, left, slots, quotas = split
    num_ranks = rank_load.size
    num_masters = left.size // num_ranks
    surplus, most = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    masters = np.empty(num_ranks, np.int64)
    pulled, given = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    time = busiest_time(rank_load, speeds)
    gained = least = goal >> contract.PROGRESS_SHIFT
    for _ in range(sweeps):
        if time <= goal or gained < least:
            return
        for slot in range(slots.shape[1]):
            pulled[:] = 0
            given[:] = 0
            for rank in range(num_ranks):
                expert = slots[rank, slot]
                most[rank] = 0
                if expert < 0:
                    continue
                master = expert // num_masters
                masters[rank] = master
                over = rank_load[master] * speeds[rank] - rank_load[rank] * speeds[master]
                surplus[rank] = over
                most[rank] = left[expert] if over > 0 else quotas[rank, slot]
                if most[rank] > 0:
                    pulled[master] += speeds[rank]
                    pulled[rank] += speeds[master]
                    given[master] += over > 0
            for rank in range(num_ranks):
                if most[rank] == 0:
                    continue
                expert = slots[rank, slot]
                master = masters[rank]
                both = pulled[master] + pulled[rank] - min(speeds[master], speeds[rank])
                both = max(both, speeds[master] + speeds[rank])
                if surplus[rank] > 0:
                    amount = min(surplus[rank] // both, most[rank] // given[master])
                else:
                    amount = -min(-surplus[rank] // both, most[rank])
                quotas[rank, slot] += amount
                left[expert] -= amount
                rank_load[master] -= amount
                rank_load[rank] += amount
        before, time = time, busiest_time(rank_load, speeds)
        gained = before - time


@compiled
def _rank_load(expert_load: Counts, slots: IntArray, quotas: Counts) -> Counts:
    """(R,) assignments where slots (R, S) compute ``quotas``, and masters the rest."""
    num_ranks = slots.shape[0]
    num_masters = expert_load.size // num_ranks
    rank_load = np.zeros(num_ranks, np.int64)
    for expert in range(expert_load.size):
        rank_load[expert // num_masters] += expert_load[expert]
    for rank in range(num_ranks):
        for slot in range(slots.shape[1]):
            if quotas[rank, slot] > 0:
                rank_load[rank] += quotas[rank, slot]
                rank_load[slots[rank, slot] // num_masters] -= quotas[rank, slot]
    return rank_load


@compiled
def _grow(now: _Scenario, other: _Scenario, batches: int, group: _Group) -> tuple[int, IntArray]:
    """The cheapest of the placements with 0, 1, 2, ... new copies: its cost, its slots (R, S)."""
    speeds = group.speeds
    slots = now.split.slots.copy()
    time = busiest_time(now.split.rank_load, speeds)
    after = busiest_time(other.split.rank_load, speeds)
    best = _total(time, after, slots, batches, group)
    for _ in range(contract.MOST_NEW_COPIES):
        worse, better = now, other
        if time - now.goal < after - other.goal:
            worse, better = other, now
        room = capacities(worse.goal, speeds) - worse.split.rank_load
        donor = int(room.argmin())
        if room[donor] >= 0:
            break
        expert = _pick_expert(donor, worse.split, better.split)
        if expert < 0:
            break
        target, slot = _pick_slot(expert, donor, room, worse, better, group)
        if target < 0:
            break
        for each in (now, other):
            _put(expert, target, slot, each.split)
            _level(contract.STEP_SWEEPS, each.goal, speeds, each.split)
        time = busiest_time(now.split.rank_load, speeds)
        after = busiest_time(other.split.rank_load, speeds)
        cost = _total(time, after, now.split.slots, batches, group)
        if cost < best:
            best = cost
            slots[:] = now.split.slots
    return best, slots


@compiled
def _pick_expert(donor: int, worse: Placement, better: Placement) -> int:
    """What ``donor`` computes most of, by master or slot, in both scenarios; -1 nothing."""
    num_masters = worse.left.size // worse.rank_load.size
    expert, most = -1, 0
    for other in range(donor * num_masters, (donor + 1) * num_masters):
        if worse.left[other] > 0 and worse.left[other] + better.left[other] > most:
            expert, most = other, worse.left[other] + better.left[other]
    for slot in range(worse.slots.shape[1]):
        both = worse.quotas[donor, slot] + better.quotas[donor, slot]
        if worse.quotas[donor, slot] > 0 and both > most:
            expert, most = worse.slots[donor, slot], both
    return expert


@compiled
def _pick_slot(
    expert: int, donor: int, room: Counts, worse: _Scenario, better: _Scenario, group: _Group
) -> tuple[int, int]:
    """Rank and slot with most ``room`` (R,) and least that would be missed; -1, where none has."""
    slots = worse.split.slots
    home = expert // (worse.split.left.size // room.size)
    whole = capacities(worse.goal, group.speeds)
    target, chosen, most = -1, -1, np.int64(-(1 << 62))
    for rank in range(room.size):
        is_near = rank // group.domain_size == home // group.domain_size
        if not is_near or rank in (donor, home) or room[rank] <= 0:
            continue
        if holds(slots, rank, expert):
            continue
        for slot in range(slots.shape[1]):
            missed = max(worse.split.quotas[rank, slot], better.split.quotas[rank, slot])
            if missed <= whole[rank] // 4 and room[rank] - 4 * missed > most:
                target, chosen, most = rank, slot, room[rank] - 4 * missed
    return target, chosen


@compiled
def _put(expert: int, rank: int, slot: int, split: Placement) -> None:
    before, amount = split.slots[rank, slot], split.quotas[rank, slot]
    if before >= 0:
        split.left[before] += amount
        split.rank_load[before // (split.left.size // split.rank_load.size)] += amount
        split.rank_load[rank] -= amount
    split.slots[rank, slot] = expert
    split.quotas[rank, slot] = 0


@compiled
def _merged(fresh: IntArray, residents: IntArray) -> IntArray:
    """Slots (R, S) that hold what ``fresh`` wants, residents where they are, and else residents."""
    merged = residents.copy()
    for rank in range(residents.shape[0]):
        for wanted in fresh[rank]:
            if wanted < 0 or holds(merged, rank, wanted):
                continue
            chosen = -1
            for slot in range(residents.shape[1]):
                if merged[rank, slot] < 0:
                    chosen = slot
                    break
                if chosen < 0 and not holds(fresh, rank, merged[rank, slot]):
                    chosen = slot
            merged[rank, chosen] = wanted
    return merged


@compiled
def _moved(quotas: Counts, fresh: IntArray, merged: IntArray) -> Counts:
    """``quotas`` (R, S) of ``fresh`` slots, of ``merged`` ones."""
    moved = np.zeros_like(quotas)
    for rank in range(fresh.shape[0]):
        for slot in range(fresh.shape[1]):
            if fresh[rank, slot] >= 0:
                for other in range(fresh.shape[1]):
                    if merged[rank, other] == fresh[rank, slot]:
                        moved[rank, other] = quotas[rank, slot]
    return moved


@compiled
def _total(time: int, after: int, slots: IntArray, batches: int, group: _Group) -> int:
    """Twice the cost of this batch, which takes ``time`` and all new copies, and of ``batches``."""
    prices = group.prices
    both = _cost(time, prices) + _cost(after, prices)
    return (
        2 * _cost(time, prices)
        + 2 * prices.copy * _busiest_link(slots, group.residents, group.num_masters)
        + batches * both
    )


@compiled
def _cost(time: int, prices: Prices) -> int:
    """What computing takes, ``prices``' unit: no less than reading the experts."""
    return max(time * FULL_SPEED, prices.least)


@compiled
def _busiest_link(slots: IntArray, residents: IntArray, num_masters: int) -> int:
    """New copies that one rank sends, or receives, at most."""
    sent = np.zeros(slots.shape[0], np.int64)
    most = int(False)
    for rank in range(slots.shape[0]):
        received = int(False)
        for slot in range(slots.shape[1]):
            if slots[rank, slot] != residents[rank, slot]:
                sent[slots[rank, slot] // num_masters] += 1
                received += 1
        most = max(most, received)
    return max(most, int(sent.max()))
