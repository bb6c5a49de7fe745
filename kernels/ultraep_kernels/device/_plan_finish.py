"""The planner's end: the plan in full, and what other kernels and the host need of it.

One program writes what is in every slot, who sends it (``relays``) and what the host learns
(``outcome``); the others write, a few experts each, quotas, shares and where the shares' places lie
(``reroute``). Where nothing is copied the latter may have nothing to do. Twin of the shares:
``host._plan_share``.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._decisions import PLANNED
from ultraep_kernels.device.outcome import store_outcome
from ultraep_kernels.device.relays import assign_senders
from ultraep_kernels.device.reroute import store_places

__all__ = ["finish"]


@triton.jit
def _winners_of(winners_ptr, domain, mask, decision):
    """The attempts taken in domains, -1 the identity."""
    winner = tl.load(winners_ptr + domain, mask=mask, other=-1)
    return tl.where(decision == PLANNED, winner, -1)


@triton.jit
def _spread(loads, quota, experts, source, NUM_RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """(X, R): what ``source`` sends where of experts (X,); twin in ``host._plan_share``."""
    ranks = tl.arange(0, BLOCK_RANKS)[None, :]
    first = (experts % NUM_RANKS)[:, None]
    turn = (ranks - first + NUM_RANKS) % NUM_RANKS
    source_turn = (source - first + NUM_RANKS) % NUM_RANKS
    is_source = ranks == source
    home = tl.sum(tl.where(is_source, tl.minimum(loads, quota), 0), axis=1)
    ahead = (ranks < NUM_RANKS) & (turn < source_turn)
    start = tl.sum(tl.where(ahead, tl.maximum(loads - quota, 0), 0), axis=1)
    end = start + tl.sum(tl.where(is_source, loads, 0), axis=1) - home
    demand = tl.maximum(quota - loads, 0)
    position = tl.cumsum(demand, axis=1) - demand
    overlap = tl.minimum(end[:, None], position + demand) - tl.maximum(start[:, None], position)
    return tl.maximum(overlap, 0) + tl.where(is_source, home[:, None], 0)


@triton.jit
def finish(
    program,  # 0, or one for every few experts
    decision,
    loads,  # this and what follows as for ``plan_kernel``
    rows,
    speeds_ptr,
    attempts,
    found,
    outcome_ptr,
    source,
    rank,
    min_saved,
    epoch_ptr,
    SIZES: tl.constexpr,
    RELAYS: tl.constexpr,
    LEAVES_EARLY: tl.constexpr,
):
    """One program's part."""
    if program == 0:
        _finish_slots(
            decision,
            loads,
            rows,
            speeds_ptr,
            attempts,
            found,
            outcome_ptr,
            source,
            rank,
            min_saved,
            epoch_ptr,
            SIZES,
            RELAYS,
        )
    else:
        if (decision == PLANNED) | (LEAVES_EARLY == 0):
            _finish_experts(program - 1, decision, loads, attempts, found, source, SIZES)


@triton.jit
def _finish_slots(
    decision,
    loads,
    rows,
    speeds_ptr,
    attempts,
    found,
    outcome_ptr,
    source,
    rank,
    min_saved,
    epoch_ptr,
    SIZES: tl.constexpr,
    RELAYS: tl.constexpr,
):
    """What every slot holds, who sends it, and what the host learns."""
    NUM_SLOTS: tl.constexpr = SIZES.num_slots
    DOMAIN_SIZE: tl.constexpr = SIZES.domain_size
    places = tl.arange(0, RELAYS.block)
    exists = places < SIZES.num_ranks * SIZES.all_slots
    of_rank: tl.constexpr = SIZES.all_slots if SIZES.all_slots > 0 else 1
    holder = places // of_rank
    slot = places % of_rank - SIZES.first_slot
    domain = holder // DOMAIN_SIZE
    winner = _winners_of(attempts.winners, domain, exists, decision)
    planned = exists & (winner >= 0) & (slot >= 0) & (slot < NUM_SLOTS)
    offsets = domain * (SIZES.search.limit + SIZES.search.thrifty) + winner
    offsets = (offsets.to(tl.int64) * NUM_SLOTS + slot) * DOMAIN_SIZE
    offsets += holder - domain * DOMAIN_SIZE
    held = tl.load(attempts.held + offsets, mask=planned, other=-1)
    amount = tl.load(attempts.quotas + offsets, mask=planned & (held >= 0), other=0)
    tl.store(found.slot_expert + places, held, mask=exists)
    if outcome_ptr is not None:
        store_outcome(
            decision,
            loads,
            rows,
            source,
            found.expert_load,
            speeds_ptr,
            held,
            amount,
            outcome_ptr,
            SIZES,
            RELAYS.block,
        )
    HAS_SENDS: tl.constexpr = SIZES.all_slots > 0 if epoch_ptr is not None else False
    if HAS_SENDS:
        sends = found.sends
        tl.store(sends.decision, decision)
        tl.store(sends.epoch, tl.load(epoch_ptr))
        if decision == PLANNED:
            tl.debug_barrier()  # slots are read as others of the program wrote them
            assign_senders(found.slot_expert, sends, rank, min_saved, RELAYS)
        else:
            tl.store(sends.tasks, 0)
            tl.store(sends.tasks + SIZES.num_ranks * SIZES.all_slots + 1, 0)


@triton.jit
def _finish_experts(block, decision, loads, attempts, found, source, SIZES: tl.constexpr):
    """Quotas, shares and places of a few experts."""
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    NUM_MASTERS: tl.constexpr = SIZES.num_masters
    NUM_SLOTS: tl.constexpr = SIZES.num_slots
    DOMAIN_SIZE: tl.constexpr = SIZES.domain_size
    ranks = tl.arange(0, SIZES.block_all_ranks)
    experts = block * SIZES.experts_written + tl.arange(0, SIZES.experts_written)
    is_expert = experts < NUM_RANKS * NUM_MASTERS
    owner = experts // NUM_MASTERS
    is_owner = ranks[None, :] == owner[:, None]
    domain = owner // DOMAIN_SIZE
    winner = _winners_of(attempts.winners, domain, is_expert, decision)
    local = ranks[None, :] - (domain * DOMAIN_SIZE)[:, None]
    inside = (ranks < NUM_RANKS)[None, :] & (local >= 0) & (local < DOMAIN_SIZE)
    inside = inside & (is_expert & (winner >= 0))[:, None]
    start = domain * (SIZES.search.limit + SIZES.search.thrifty) + winner
    start = start.to(tl.int64) * (NUM_SLOTS * DOMAIN_SIZE)
    quota = tl.full((SIZES.experts_written, SIZES.block_all_ranks), 0, tl.int32)
    width: tl.constexpr = NUM_MASTERS + SIZES.all_slots
    master = ranks[None, :] * width + (experts % NUM_MASTERS)[:, None]
    physical = tl.where(is_owner, master, -1)
    for slot in tl.static_range(NUM_SLOTS):
        offsets = start[:, None] + slot * DOMAIN_SIZE + local
        held = tl.load(attempts.held + offsets, mask=inside, other=-1)
        amount = tl.load(attempts.quotas + offsets, mask=inside, other=0)
        is_held = held == experts[:, None]
        quota += tl.where(is_held, amount, 0)
        here = ranks[None, :] * width + (NUM_MASTERS + SIZES.first_slot + slot)
        physical = tl.where(is_held, here, physical)
    expert_load = tl.load(found.expert_load + experts, mask=is_expert, other=0)
    rest = tl.maximum(expert_load, 0) - tl.sum(quota, axis=1)
    quota += tl.where(is_owner, rest[:, None], 0)
    mask = is_expert[:, None] & (ranks < NUM_RANKS)[None, :]
    columns = ranks.to(tl.int64)[None, :] * loads.stride + experts[:, None]
    values = tl.load(loads.table + columns, mask=mask, other=0).to(tl.int32)
    share = _spread(values, quota, experts, source, NUM_RANKS, SIZES.block_all_ranks)
    own = tl.sum(tl.where((ranks == source)[None, :], values, 0), axis=1)
    at_home = tl.where(is_owner, own[:, None], 0)
    share = tl.where(decision == PLANNED, share, at_home)
    offsets = experts[:, None] * NUM_RANKS + ranks[None, :]
    tl.store(found.quota + offsets, quota, mask=mask)
    tl.store(found.share + offsets, share, mask=mask)
    store_places(
        experts,
        share,
        physical,
        found.places,
        NUM_RANKS * NUM_MASTERS,
        NUM_RANKS,
        SIZES.block_all_ranks,
    )
