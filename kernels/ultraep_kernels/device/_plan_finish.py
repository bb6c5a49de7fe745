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
    program,  # 0, or one for every BLOCK_EXPERTS experts
    decision,
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32
    winners_ptr,  # (domains,) int32
    held_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    quotas_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    slot_expert_ptr,  # (R, ALL_SLOTS) int32, out
    quota_ptr,  # (E, R) int32, out
    share_ptr,  # (E, R) int32, out
    ends_ptr,  # (E, R) int32, out
    physical_ptr,  # (E, R) int32, out
    stride_ptr,  # (E,) int32, out
    parents_ptr,  # (R, ALL_SLOTS) int32, out; this and the next two not without HAS_SENDS
    tasks_ptr,  # (2, 1 + R * ALL_SLOTS) int32, out
    turn_ptr,  # (R * ALL_SLOTS,) int32, scratch
    sends_decision_ptr,  # (1,) int32, out; this and the next two not without HAS_SENDS either
    sends_epoch_ptr,  # (1,) int64, out
    epoch_ptr,  # (2,) int64
    rows_ptr,  # (R, .) int32; this and the next two not without HAS_OUTCOME
    speeds_ptr,  # (R,) int32
    outcome_ptr,  # (outcome_width,) int32, out
    source,
    rank,  # that sends
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,  # of a rank
    FIRST_SLOT: tl.constexpr,  # of those, from which NUM_SLOTS are planned for
    DOMAIN_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    HAS_SENDS: tl.constexpr,
    HAS_OUTCOME: tl.constexpr,
    LEAVES_EARLY: tl.constexpr,  # nobody reads quotas, shares and places of the identity
    MIN_REPLICAS: tl.constexpr,
    MIN_SAVED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """One program's part."""
    attempts: tl.constexpr = LIMIT + THRIFTY
    if program == 0:
        places = tl.arange(0, BLOCK)
        exists = places < NUM_RANKS * ALL_SLOTS
        of_rank: tl.constexpr = ALL_SLOTS if ALL_SLOTS > 0 else 1
        holder = places // of_rank
        slot = places % of_rank - FIRST_SLOT
        domain = holder // DOMAIN_SIZE
        winner = _winners_of(winners_ptr, domain, exists, decision)
        planned = exists & (winner >= 0) & (slot >= 0) & (slot < NUM_SLOTS)
        offsets = ((domain * attempts + winner).to(tl.int64) * NUM_SLOTS + slot) * DOMAIN_SIZE
        offsets += holder - domain * DOMAIN_SIZE
        held = tl.load(held_ptr + offsets, mask=planned, other=-1)
        amount = tl.load(quotas_ptr + offsets, mask=planned & (held >= 0), other=0)
        tl.store(slot_expert_ptr + places, held, mask=exists)
        if HAS_OUTCOME:
            store_outcome(
                decision,
                rows_ptr,
                expert_load_ptr,
                speeds_ptr,
                held,
                amount,
                outcome_ptr,
                NUM_RANKS * NUM_MASTERS,
                NUM_RANKS,
                ALL_SLOTS,
                BLOCK,
            )
        if HAS_SENDS:
            tl.store(sends_decision_ptr, decision)
            tl.store(sends_epoch_ptr, tl.load(epoch_ptr))
            if decision == PLANNED:
                tl.debug_barrier()  # slots are read as others of the program wrote them
                assign_senders(
                    slot_expert_ptr,
                    parents_ptr,
                    tasks_ptr,
                    turn_ptr,
                    rank,
                    NUM_RANKS,
                    NUM_MASTERS,
                    ALL_SLOTS,
                    MIN_REPLICAS,
                    MIN_SAVED,
                    BLOCK,
                    BLOCK_RANKS,
                    TILE,
                )
            else:
                tl.store(tasks_ptr, 0)
                tl.store(tasks_ptr + NUM_RANKS * ALL_SLOTS + 1, 0)
    else:
        if (decision == PLANNED) | (LEAVES_EARLY == 0):
            ranks = tl.arange(0, BLOCK_RANKS)
            experts = (program - 1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
            is_expert = experts < NUM_RANKS * NUM_MASTERS
            owner = experts // NUM_MASTERS
            is_owner = ranks[None, :] == owner[:, None]
            domain = owner // DOMAIN_SIZE
            winner = _winners_of(winners_ptr, domain, is_expert, decision)
            local = ranks[None, :] - (domain * DOMAIN_SIZE)[:, None]
            inside = (ranks < NUM_RANKS)[None, :] & (local >= 0) & (local < DOMAIN_SIZE)
            inside = inside & (is_expert & (winner >= 0))[:, None]
            start = (domain * attempts + winner).to(tl.int64) * (NUM_SLOTS * DOMAIN_SIZE)
            quota = tl.zeros((BLOCK_EXPERTS, BLOCK_RANKS), tl.int32)
            width: tl.constexpr = NUM_MASTERS + ALL_SLOTS
            master = ranks[None, :] * width + (experts % NUM_MASTERS)[:, None]
            physical = tl.where(is_owner, master, -1)
            for slot in tl.static_range(NUM_SLOTS):
                offsets = start[:, None] + slot * DOMAIN_SIZE + local
                held = tl.load(held_ptr + offsets, mask=inside, other=-1)
                amount = tl.load(quotas_ptr + offsets, mask=inside, other=0)
                is_held = held == experts[:, None]
                quota += tl.where(is_held, amount, 0)
                here = ranks[None, :] * width + (NUM_MASTERS + FIRST_SLOT + slot)
                physical = tl.where(is_held, here, physical)
            expert_load = tl.load(expert_load_ptr + experts, mask=is_expert, other=0)
            rest = tl.maximum(expert_load, 0) - tl.sum(quota, axis=1)
            quota += tl.where(is_owner, rest[:, None], 0)
            mask = is_expert[:, None] & (ranks < NUM_RANKS)[None, :]
            columns = ranks.to(tl.int64)[None, :] * stride_rank + experts[:, None]
            loads = tl.load(loads_ptr + columns, mask=mask, other=0).to(tl.int32)
            share = _spread(loads, quota, experts, source, NUM_RANKS, BLOCK_RANKS)
            own = tl.sum(tl.where((ranks == source)[None, :], loads, 0), axis=1)
            at_home = tl.where(is_owner, own[:, None], 0)
            share = tl.where(decision == PLANNED, share, at_home)
            offsets = experts[:, None] * NUM_RANKS + ranks[None, :]
            tl.store(quota_ptr + offsets, quota, mask=mask)
            tl.store(share_ptr + offsets, share, mask=mask)
            store_places(
                experts,
                share,
                physical,
                ends_ptr,
                physical_ptr,
                stride_ptr,
                NUM_RANKS * NUM_MASTERS,
                NUM_RANKS,
                BLOCK_RANKS,
            )
