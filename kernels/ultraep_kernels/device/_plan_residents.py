"""Where copies stay: the load split over what slots hold, beside new copies (``_plan_grow``).

One program of one warp splits it, says whether new copies are wanted, and grows. Attempts of a
fresh plan are made only where they are wanted, beside that; the last of them compares. State lies
in the memory of the layer, of which the launch is the only one to know, slot by slot. Twins:
``host._plan_residents``, ``ultraep_serve.plan.residents``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels import contract
from ultraep_kernels.contract import Prices
from ultraep_kernels.device._plan_attempt import NOBODY
from ultraep_kernels.device._plan_decide import rank_loads, saved_time, take_best
from ultraep_kernels.device._plan_level import level, speeds_in
from ultraep_kernels.device._plan_times import FULL, busiest, least_time
from ultraep_kernels.device._signals import put
from ultraep_kernels.device.reroute import every_32nd
from ultraep_kernels.device.status import PLANNED, UNPROFITABLE

# words of a layer's state, int64: batches that were planned, how often ranks had experts
# changed, the layer's number; then the slots (S, R), and the average load (E,)
_BATCHES, _CHANGES, _LAYER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RESIDENTS = tl.constexpr(3)
_FORGET, _TURN = tl.constexpr(contract.FORGET), tl.constexpr(contract.TURN)
_SHIFT = tl.constexpr(contract.AVERAGE_SHIFT)
_SOON, _LATER = tl.constexpr(contract.SOON_BATCHES), tl.constexpr(contract.LATER_BATCHES)
_SWEEPS = tl.constexpr(contract.SPLIT_SWEEPS)
_AT_ONCE = tl.constexpr(128)  # experts, or slots
# of what is in memory: the cost of the best slots, batches that they are meant for
BEST, _HORIZON, OTHER_GOAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Kept(NamedTuple):
    """What a launch works with where copies stay; tensors on the device, but for prices scratch."""

    prices: torch.Tensor  # (2,) int64, as ``contract.Prices``
    mirror: torch.Tensor  # (E,) int32: the load that is expected to come in turn with this one
    left: torch.Tensor  # (2, E) int32, of the load and of its mirror: what masters still compute
    loads: torch.Tensor  # (2, R) int32: of ranks, while they are levelled
    pulled: torch.Tensor  # (R,) int32: speeds of all whom a rank is levelled with at once
    given: torch.Tensor  # (R,) int32: to how many of them it gives
    placed: torch.Tensor  # (2, S, R, 2) int32: experts in slots, what they compute
    best: torch.Tensor  # (S, R) int32: the cheapest slots so far
    words: torch.Tensor  # (3,) int64: see above
    wanted: torch.Tensor  # (1,) int32: whether new copies are


def new_states(
    num_layers: int, num_experts: int, num_ranks: int, num_slots: int, device: torch.device
) -> torch.Tensor:
    """(N, W) int64: of each layer what is in its slots, which is nothing yet."""
    width = RESIDENTS.value + num_ranks * num_slots
    states = torch.zeros((num_layers, width + num_experts), dtype=torch.int64, device=device)
    states[:, _LAYER.value] = torch.arange(num_layers, device=device)
    states[:, RESIDENTS.value : width] = -1
    return states


def new_kept(
    prices: Prices, num_experts: int, num_ranks: int, num_slots: int, device: torch.device
) -> Kept:
    """To be written by the launch, but for ``prices``."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Kept(
        prices=torch.tensor(prices, dtype=torch.int64, device=device),
        mirror=empty(num_experts),
        left=empty(2, num_experts),
        loads=empty(2, num_ranks),
        pulled=empty(num_ranks),
        given=empty(num_ranks),
        placed=empty(2, num_slots, num_ranks, 2),
        best=empty(num_slots, num_ranks),
        words=empty(3, dtype=torch.int64),
        wanted=empty(1),
    )


@triton.jit
def forget_what_changed(rows, state_ptr, SIZES: tl.constexpr):
    """Empty the layer's slots where a rank says that experts have changed since last time."""
    ranks = tl.arange(0, SIZES.block_all_ranks)
    row_ptr = rows.table + ranks.to(tl.int64) * rows.stride
    said = tl.load(row_ptr + _FORGET, mask=ranks < SIZES.num_ranks, other=0).to(tl.int64)
    changes = tl.sum(said, axis=0)
    if changes != tl.load(state_ptr + _CHANGES):
        tl.debug_barrier()  # all lanes have read
        tl.store(state_ptr + _CHANGES, changes)
        tl.store(state_ptr + _BATCHES, changes * 0)
        places = tl.arange(0, SIZES.block_places)
        nothing = tl.full((SIZES.block_places,), -1, tl.int64)
        is_place = places < SIZES.num_ranks * SIZES.num_slots
        tl.store(state_ptr + RESIDENTS + places, nothing, mask=is_place)
        tl.debug_barrier()


@triton.jit
def split_residents(attempts, found, kept, state_ptr, SIZES: tl.constexpr):
    """The load over what slots hold: rank_load (R,), are copies wanted, is it the layer's turn."""
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    NUM_PLACES: tl.constexpr = NUM_RANKS * SIZES.num_slots
    batches = tl.load(state_ptr + _BATCHES)
    average_ptr = state_ptr + RESIDENTS + NUM_PLACES
    index = tl.arange(0, _AT_ONCE)
    for start in range(0, SIZES.num_experts, _AT_ONCE):
        experts = start + index
        is_expert = experts < SIZES.num_experts
        load = tl.load(found.expert_load + experts, mask=is_expert, other=0).to(tl.int64)
        before = tl.load(average_ptr + experts, mask=is_expert, other=0)
        before = tl.where(batches > 0, before, load << _SHIFT)
        average = before + load - (before >> _SHIFT)
        mirror = tl.maximum(2 * (average >> _SHIFT) - load, 0)
        tl.store(average_ptr + experts, average, mask=is_expert)
        tl.store(kept.mirror + experts, mirror.to(tl.int32), mask=is_expert)
    for start in range(0, NUM_PLACES, _AT_ONCE):
        places = start + index
        held = tl.load(state_ptr + RESIDENTS + places, mask=places < NUM_PLACES, other=-1)
        tl.store(kept.best + places, held.to(tl.int32), mask=places < NUM_PLACES)
    tl.debug_barrier()
    batches += 1
    tl.store(state_ptr + _BATCHES, batches)
    is_turn = (batches + tl.load(state_ptr + _LAYER)) % _TURN == 0
    tl.store(kept.words + _HORIZON, tl.where(is_turn, _LATER, _SOON).to(tl.int64))
    goal = tl.load(attempts.goal)
    rank_load = split_again(attempts, found, kept, SIZES)
    time = busiest(rank_load, speeds_in(attempts, SIZES))
    prices = tl.load(kept.prices), tl.load(kept.prices + 1)
    is_wanted = _cost(time, prices) - _cost(goal, prices) > prices[0]
    return rank_load, is_wanted, is_turn


@triton.jit
def split_again(attempts, found, kept, SIZES: tl.constexpr):
    """rank_load (R,) where the load is split over the best slots from the beginning."""
    goal, loads_ptr = tl.load(attempts.goal), found.expert_load
    home = rank_loads(loads_ptr, SIZES)
    return split_over(0, loads_ptr, home, goal, attempts, kept, kept.best, 1, SIZES)


@triton.jit
def compare_fresh(attempts, found, kept, state_ptr, SIZES: tl.constexpr):
    """The busiest rank's time with what is cheaper: the best slots, or those of a fresh plan.

    Not compared where a fresh plan with one new copy, at both goals, would save less than another.
    """
    _, time, _, _ = take_best(attempts, SIZES)
    tl.debug_barrier()  # the winners are read
    time = time.to(tl.int64)
    best, other_goal = tl.load(kept.words + BEST), tl.load(kept.words + OTHER_GOAL)
    prices = tl.load(kept.prices), tl.load(kept.prices + 1)
    now, other = _cost(tl.load(attempts.goal), prices), _cost(other_goal, prices)
    least = 2 * now + 4 * prices[0] + tl.load(kept.words + _HORIZON) * (now + other)
    total = best
    if best > least:
        _merge_fresh(attempts, kept, state_ptr, SIZES)
        home = rank_loads(kept.mirror, SIZES)
        after = split_over(1, kept.mirror, home, other_goal, attempts, kept, kept.placed, 2, SIZES)
        after = busiest(after, speeds_in(attempts, SIZES))
        total = total_cost(time, after, kept, state_ptr, SIZES)
    if total >= best:
        time = busiest(split_again(attempts, found, kept, SIZES), speeds_in(attempts, SIZES))
    return time


@triton.jit
def _merge_fresh(attempts, kept, state_ptr, SIZES: tl.constexpr):
    """Place what a fresh plan holds; copies that are there already keep their slots."""
    DOMAIN_SIZE: tl.constexpr = SIZES.domain_size
    ranks, slots = every_32nd(SIZES.block_all_ranks), tl.arange(0, SIZES.block_slots)
    exists = ranks < SIZES.num_ranks
    domain = ranks // DOMAIN_SIZE
    winner = tl.load(attempts.winners + domain, mask=exists, other=-1)
    start = (domain * SIZES.num_attempts + winner).to(tl.int64) * SIZES.num_slots
    fresh_ptr = attempts.placed + (start * DOMAIN_SIZE + ranks - domain * DOMAIN_SIZE) * 2
    has_fresh = exists & (winner >= 0)
    is_place = (slots < SIZES.num_slots)[:, None] & exists[None, :]
    place = slots[:, None] * SIZES.num_ranks + ranks[None, :]
    held = tl.load(state_ptr + RESIDENTS + place, mask=is_place, other=-1).to(tl.int32)
    needed = (held == -2).to(tl.int32)
    for number in range(0, SIZES.num_slots):
        wanted = tl.load(fresh_ptr + number * (DOMAIN_SIZE * 2), mask=has_fresh, other=-1)
        needed |= (is_place & (held >= 0) & (held == wanted[None, :])).to(tl.int32)
    amounts = held * 0
    for number in range(0, SIZES.num_slots):
        pair_ptr = fresh_ptr + number * (DOMAIN_SIZE * 2)
        wanted = tl.load(pair_ptr, mask=has_fresh, other=-1)
        amount = tl.load(pair_ptr + 1, mask=has_fresh & (wanted >= 0), other=0)
        holds = tl.max((held == wanted[None, :]).to(tl.int32), axis=0)
        # an empty slot, else the first that is not needed
        order = tl.where(held < 0, slots[:, None], slots[:, None] + SIZES.block_slots)
        order = tl.where(is_place & (needed == 0), order, NOBODY)
        first = tl.min(order, axis=0)
        takes = (order == first[None, :]) & is_place & (order < NOBODY)
        takes = takes & ((wanted >= 0) & (holds == 0))[None, :]
        held = tl.where(takes, wanted[None, :], held)
        needed = tl.where(takes, 1, needed)
        amounts = tl.where((held == wanted[None, :]) & (held >= 0), amount[None, :], amounts)
    tl.store(kept.placed + place * 2, held, mask=is_place)
    tl.store(kept.placed + place * 2 + 1, amounts, mask=is_place)
    tl.debug_barrier()


@triton.jit
def decide(time, gate, attempts, found, kept, state_ptr, SIZES: tl.constexpr):
    """Follow the plan, which takes ``time``, where it has new copies or pays without."""
    decision = time.to(tl.int32) * 0 + PLANNED
    if gate is not None:
        places = tl.arange(0, SIZES.block_places)
        is_new, _ = _new_copies(places, kept, state_ptr, SIZES)
        before = time * 0
        for domain in range(0, SIZES.num_domains):
            worst = tl.load(attempts.keys + (domain + 1) * (SIZES.num_attempts + 1) - 1) >> 32
            before = tl.maximum(before, worst)
        none = time * 0
        saved = saved_time(before, time, none, none, gate, SIZES.num_masters)
        pays = (saved > 0) | (tl.max(is_new.to(tl.int32), axis=0) > 0)
        decision = tl.where(pays, PLANNED, UNPROFITABLE)
    put(found.decision, decision)  # others may look


@triton.jit
def goal_of(rank_load, speeds, SIZES: tl.constexpr):
    """As the survey's: a time, of ranks with ``rank_load`` and every expert at home."""
    ranks = every_32nd(SIZES.block_all_ranks)
    least = tl.full((), 0, tl.int64)
    for domain in range(0, SIZES.num_domains):
        is_member = (ranks < SIZES.num_ranks) & (ranks // SIZES.domain_size == domain)
        least = tl.maximum(least, least_time(rank_load, tl.where(is_member, speeds, 0)))
    return least + (least + SIZES.search.grain // 2) // SIZES.search.grain


@triton.jit
def split_over(
    number,  # of the scenario: 0 the load, 1 its mirror
    loads_ptr,  # (E,) int32
    home,  # (R,) int32: what ranks compute with every expert on its master
    goal,
    attempts,
    kept,
    slots_ptr,  # (S, R) int32, STEP apart
    STEP: tl.constexpr,
    SIZES: tl.constexpr,
):
    """rank_load (R,) where a load is split over slots; what is left and placed is in memory."""
    NUM_PLACES: tl.constexpr = SIZES.num_ranks * SIZES.num_slots
    left_ptr = kept.left + number * SIZES.num_experts
    placed_ptr = kept.placed + number * (2 * NUM_PLACES)
    index = tl.arange(0, _AT_ONCE)
    for start in range(0, SIZES.num_experts, _AT_ONCE):
        experts = start + index
        load = tl.load(loads_ptr + experts, mask=experts < SIZES.num_experts, other=0)
        tl.store(left_ptr + experts, load, mask=experts < SIZES.num_experts)
    for start in range(0, NUM_PLACES, _AT_ONCE):
        places = start + index
        held = tl.load(slots_ptr + places * STEP, mask=places < NUM_PLACES, other=-1)
        tl.store(placed_ptr + places * 2, held, mask=places < NUM_PLACES)
        tl.store(placed_ptr + places * 2 + 1, held * 0, mask=places < NUM_PLACES)
    tl.debug_barrier()
    return level(number, home, attempts, goal, kept, _SWEEPS, SIZES)


@triton.jit
def _new_copies(places, kept, state_ptr, SIZES: tl.constexpr):
    """Whether each of ``places`` has another expert than before, and which."""
    is_place = places < SIZES.num_ranks * SIZES.num_slots
    held = tl.load(kept.placed + places * 2, mask=is_place, other=-1)
    before = tl.load(state_ptr + RESIDENTS + places, mask=is_place, other=-1).to(tl.int32)
    return is_place & (held != before), held


@triton.jit
def total_cost(time, after, kept, state_ptr, SIZES: tl.constexpr):
    """Twice the cost of this batch, which takes ``time`` and all new copies, and of those to come.

    Of copies where the load, not its mirror, is placed.
    """
    places = tl.arange(0, SIZES.block_places)
    is_new, held = _new_copies(places, kept, state_ptr, SIZES)
    owner = tl.maximum(held, 0) // SIZES.num_masters
    sent = tl.histogram(owner, SIZES.block_all_ranks, mask=is_new)
    received = tl.histogram(places % SIZES.num_ranks, SIZES.block_all_ranks, mask=is_new)
    link = tl.max(tl.maximum(sent, received), axis=0)
    prices = tl.load(kept.prices), tl.load(kept.prices + 1)
    horizon = tl.load(kept.words + _HORIZON)
    both = _cost(time, prices) + _cost(after, prices)
    return 2 * _cost(time, prices) + 2 * prices[0] * link + horizon * both


@triton.jit
def _cost(time, prices):
    return tl.maximum(time * FULL, prices[1])
