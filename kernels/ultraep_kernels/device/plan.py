"""plan: loads (R, E) of all ranks -> slot_expert, quota and this rank's share; the quota planner.

Four launches: the load of every expert; the first wave of attempts, one program each; the second
wave, whose programs return at once where the first reached the goal; one program per expert, which
picks the best attempt and writes the plan out. Twin: ``ultraep_serve.policies.quota.plan_quota``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ultraep_kernels.device._attempt import attempt, count_replicas, relax, valid_total
from ultraep_kernels.device.status import IMPOSSIBLE_LOADS
from ultraep_kernels.plan import search_of

__all__ = ["DevicePlan", "plan"]

_BLOCK_COLUMNS = 32  # experts per program of the sum
_BLOCK_MASTERS = 8  # of every rank, added at a time
_NO_KEY = tl.constexpr((1 << 63) - 1)


@dataclass(frozen=True)
class DevicePlan:
    """Where replicas go and how many assignments each rank computes; tensors on the device."""

    slot_expert: torch.Tensor  # (R, S) int32: logical expert in each slot, -1 empty
    quota: torch.Tensor  # (E, R) int32: assignments of expert e that rank r computes
    share: torch.Tensor  # (E, R) int32: this source rank's part of the quota


@triton.jit
def _sum_kernel(
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32, out; -1 where an expert's loads are impossible
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    ranks = tl.arange(0, BLOCK_RANKS)
    mask = (ranks < NUM_RANKS)[:, None] & (columns < NUM_EXPERTS)[None, :]
    offsets = ranks.to(tl.int64)[:, None] * stride_rank + columns[None, :]
    loads = tl.load(loads_ptr + offsets, mask=mask, other=0).to(tl.int64)
    total = tl.sum(loads, axis=0)
    legal = (tl.min(loads, axis=0) >= 0) & (total < (1 << 31))
    load = tl.where(legal, total, -1).to(tl.int32)
    tl.store(expert_load_ptr + columns, load, mask=columns < NUM_EXPERTS)


@triton.jit
def _goal_of(
    expert_load,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Rank load to reach: no domain need be better than the best the busiest one can reach."""
    domains = tl.arange(0, BLOCK_EXPERTS) // (NUM_MASTERS * DOMAIN_SIZE)
    goal = tl.sum(expert_load, axis=0) * 0
    for domain in range(0, (NUM_RANKS + DOMAIN_SIZE - 1) // DOMAIN_SIZE):
        members = tl.minimum(DOMAIN_SIZE, NUM_RANKS - domain * DOMAIN_SIZE)
        total = tl.sum(tl.where(domains == domain, expert_load, 0), axis=0)
        goal = tl.maximum(goal, (total + members - 1) // members)
    return goal + (goal + GRAIN // 2) // GRAIN


@triton.jit
def _rank_loads(
    expert_load_ptr,
    num_ranks,
    NUM_MASTERS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
):
    """(R,) assignments per rank when every expert is computed by its master."""
    ranks = tl.arange(0, BLOCK_RANKS)
    rank_load = tl.zeros((BLOCK_RANKS,), tl.int32)
    for start in range(0, NUM_MASTERS, BLOCK_MASTERS):
        masters = start + tl.arange(0, BLOCK_MASTERS)
        mask = (masters < NUM_MASTERS)[:, None] & (ranks < num_ranks)[None, :]
        offsets = ranks[None, :] * NUM_MASTERS + masters[:, None]
        rank_load += tl.sum(tl.load(expert_load_ptr + offsets, mask=mask, other=0), axis=0)
    return rank_load


@triton.jit
def _attempt_kernel(
    expert_load_ptr,  # (E,) int32
    keys_ptr,  # (domains, LIMIT + 2) int64: of each attempt, of the identity, and the goal
    held_ptr,  # (domains, LIMIT, S, D) int32
    quotas_ptr,  # (domains, LIMIT, S, D) int32
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    SWEEPS: tl.constexpr,
    WAVE: tl.constexpr,
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    domain = tl.program_id(0)
    number = tl.program_id(1) + WAVE * FIRST
    first_rank = domain * DOMAIN_SIZE
    num_ranks = tl.minimum(DOMAIN_SIZE, NUM_RANKS - first_rank)
    all_experts = tl.arange(0, BLOCK_ALL_EXPERTS)
    exists = all_experts < NUM_RANKS * NUM_MASTERS
    every_load = tl.load(expert_load_ptr + all_experts, mask=exists, other=0)
    goal = _goal_of(every_load, NUM_RANKS, NUM_MASTERS, DOMAIN_SIZE, GRAIN, BLOCK_ALL_EXPERTS)
    own_ptr = expert_load_ptr + first_rank * NUM_MASTERS
    rank_load = _rank_loads(own_ptr, num_ranks, NUM_MASTERS, BLOCK_RANKS, BLOCK_MASTERS)
    worst = tl.max(rank_load, axis=0)
    row_ptr = keys_ptr + domain * (LIMIT + 2)
    gap = worst * 0
    if WAVE == 1:
        numbers = tl.arange(0, BLOCK_KEYS)
        keys = tl.load(row_ptr + numbers, mask=numbers < FIRST, other=_NO_KEY)
        best = tl.minimum(tl.min(keys, axis=0) >> 32, worst.to(tl.int64)).to(tl.int32)
        gap = tl.maximum(best - goal, 0)
        needed = gap > 0
    else:
        needed = worst > goal
        if number == 0:
            tl.store(row_ptr + LIMIT, worst.to(tl.int64) << 32)
            tl.store(row_ptr + LIMIT + 1, goal.to(tl.int64))
    key = worst.to(tl.int64) * 0 + _NO_KEY
    if needed & valid_total(every_load):
        experts = tl.arange(0, BLOCK_EXPERTS)
        mine = experts < num_ranks * NUM_MASTERS
        left = tl.load(own_ptr + experts, mask=mine, other=0)
        between = (gap.to(tl.int64) * (number // 2 % 5) // 4).to(tl.int32)
        loads, left, held, quotas = attempt(
            goal + between,
            number % 2 == 0,
            number // 2,
            rank_load,
            left,
            num_ranks,
            NUM_MASTERS,
            NUM_SLOTS,
            BLOCK_RANKS,
            BLOCK_EXPERTS,
            BLOCK_SLOTS,
        )
        if tl.max(loads, axis=0) > goal:
            loads, held, quotas = relax(
                loads,
                left,
                held,
                quotas,
                num_ranks,
                NUM_MASTERS,
                NUM_SLOTS,
                SWEEPS,
                BLOCK_RANKS,
                BLOCK_EXPERTS,
                BLOCK_SLOTS,
            )
        sent, total = count_replicas(held, NUM_MASTERS, BLOCK_RANKS, BLOCK_SLOTS)
        reached = tl.maximum(tl.max(loads, axis=0), goal).to(tl.int64)
        key = (reached << 32) | (sent.to(tl.int64) << 16) | total
        ranks = tl.arange(0, BLOCK_RANKS)
        slots = tl.arange(0, BLOCK_SLOTS)
        mask = (slots < NUM_SLOTS)[:, None] & (ranks < num_ranks)[None, :]
        start = (domain * LIMIT + number).to(tl.int64) * (NUM_SLOTS * DOMAIN_SIZE)
        offsets = start + slots[:, None] * DOMAIN_SIZE + ranks[None, :]
        held = tl.where(held >= 0, held + first_rank * NUM_MASTERS, -1)
        tl.store(held_ptr + offsets, held, mask=mask)
        tl.store(quotas_ptr + offsets, quotas, mask=mask)
    tl.store(row_ptr + number, key)


@triton.jit
def _winner(row_ptr, FIRST: tl.constexpr, LIMIT: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The attempt that the CPU's search, one after another, would have kept; -1 the identity."""
    numbers = tl.arange(0, BLOCK_KEYS)
    identity = tl.load(row_ptr + LIMIT)
    goal = tl.load(row_ptr + LIMIT + 1)
    first_keys = tl.load(row_ptr + numbers, mask=numbers < FIRST, other=_NO_KEY)
    least = tl.min(first_keys, axis=0)
    both = tl.minimum(least, identity) >> 32 > goal  # the second wave ran as well
    made = tl.where(both, LIMIT, FIRST)
    keys = tl.load(row_ptr + numbers, mask=numbers < made, other=_NO_KEY)
    reached = both & (keys >> 32 <= goal)  # the search ends with the first of these
    ends = tl.min(tl.where(reached, numbers, BLOCK_KEYS), axis=0)
    least = tl.min(keys, axis=0)
    lowest = tl.min(tl.where(keys == least, numbers, BLOCK_KEYS), axis=0)
    winner = tl.where(ends < BLOCK_KEYS, ends, lowest)
    return tl.where(least < identity, winner, -1)


@triton.jit
def _finish_kernel(
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32
    keys_ptr,  # (domains, LIMIT + 2) int64
    held_ptr,  # (domains, LIMIT, S, D) int32
    quotas_ptr,  # (domains, LIMIT, S, D) int32
    slot_expert_ptr,  # (R, S) int32, out
    quota_ptr,  # (E, R) int32, out
    share_ptr,  # (E, R) int32, out
    status_ptr,  # (1,) int32
    source,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: no attempt was made
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    expert = tl.program_id(0)
    owner = expert // NUM_MASTERS
    domain = owner // DOMAIN_SIZE
    ranks = tl.arange(0, BLOCK_RANKS)
    exists = ranks < NUM_RANKS
    all_experts = tl.arange(0, BLOCK_ALL_EXPERTS)
    is_expert = all_experts < NUM_RANKS * NUM_MASTERS
    every_load = tl.load(expert_load_ptr + all_experts, mask=is_expert, other=0)
    valid = valid_total(every_load)
    if (expert == 0) & (valid == 0):
        tl.atomic_or(status_ptr, IMPOSSIBLE_LOADS)
    winner = expert * 0 - 1
    if LIMIT > 0:
        winner = _winner(keys_ptr + domain * (LIMIT + 2), FIRST, LIMIT, BLOCK_KEYS)
        winner = tl.where(valid, winner, -1)
    local = ranks - domain * DOMAIN_SIZE
    inside = exists & (local >= 0) & (local < tl.where(winner >= 0, DOMAIN_SIZE, 0))
    start = (domain * LIMIT + winner).to(tl.int64) * (NUM_SLOTS * DOMAIN_SIZE)
    quota = tl.zeros((BLOCK_RANKS,), tl.int32)
    for slot in tl.static_range(NUM_SLOTS):
        offsets = start + slot * DOMAIN_SIZE + local
        held = tl.load(held_ptr + offsets, mask=inside, other=-1)
        amount = tl.load(quotas_ptr + offsets, mask=inside, other=0)
        quota += tl.where(held == expert, amount, 0)
        if expert % NUM_MASTERS == 0:  # one expert of each rank writes what the rank holds
            mine = ranks == owner
            tl.store(slot_expert_ptr + ranks * NUM_SLOTS + slot, held, mask=mine)
    expert_load = tl.load(expert_load_ptr + expert)
    quota += tl.where(ranks == owner, expert_load - tl.sum(quota, axis=0), 0)
    column_ptr = loads_ptr + ranks.to(tl.int64) * stride_rank + expert
    loads = tl.load(column_ptr, mask=exists, other=0).to(tl.int32)
    share = _spread(loads, quota, ranks, expert, source, NUM_RANKS)
    own = tl.sum(tl.where(ranks == source, loads, 0), axis=0)
    share = tl.where(valid, share, tl.where(ranks == owner, own, 0))
    tl.store(quota_ptr + expert * NUM_RANKS + ranks, quota, mask=exists)
    tl.store(share_ptr + expert * NUM_RANKS + ranks, share, mask=exists)


@triton.jit
def _spread(loads, quota, ranks, expert, source, NUM_RANKS: tl.constexpr):
    """(R,) what ``source`` sends where of one expert; twin ``_spread`` in policies/_share.py."""
    first = expert % NUM_RANKS
    turn = (ranks - first + NUM_RANKS) % NUM_RANKS
    source_turn = (source - first + NUM_RANKS) % NUM_RANKS
    is_source = ranks == source
    home = tl.sum(tl.where(is_source, tl.minimum(loads, quota), 0), axis=0)
    ahead = (ranks < NUM_RANKS) & (turn < source_turn)
    start = tl.sum(tl.where(ahead, tl.maximum(loads - quota, 0), 0), axis=0)
    end = start + tl.sum(tl.where(is_source, loads, 0), axis=0) - home
    demand = tl.maximum(quota - loads, 0)
    position = tl.cumsum(demand, axis=0) - demand
    overlap = tl.minimum(end, position + demand) - tl.maximum(start, position)
    return tl.maximum(overlap, 0) + tl.where(is_source, home, 0)


def plan(
    loads: torch.Tensor,
    num_replica_slots: int,
    source_rank: int,
    status: torch.Tensor,
    *,
    domain_size: int | None = None,
) -> DevicePlan:
    """Plan one layer of one batch: the same slots and quotas on every rank, as on CPU.

    Args:
        loads: int32 or int64 (R, E) on the device, rows may be apart; row r is what rank r's own
            tokens chose. E is a multiple of R.
        num_replica_slots: S, may be 0.
        source_rank: rank whose ``share`` is wanted.
        status: (1,) int32. Loads that are negative, or together more than 2**28, set
            IMPOSSIBLE_LOADS and give the identity.
        domain_size: copies stay within contiguous groups of this many ranks; None is all ranks.
    """
    num_ranks, num_experts = loads.shape
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts = } must be a multiple of {num_ranks = }")
    if loads.stride(1) != 1:
        raise ValueError(f"{loads.stride() = }: experts must lie side by side")
    device = loads.device
    slots = num_replica_slots
    size = min(domain_size or num_ranks, num_ranks)
    num_masters = num_experts // num_ranks
    search = search_of(size, num_masters)
    limit = search.limit if slots and size > 1 else 0
    domains = triton.cdiv(num_ranks, size)
    expert_load = torch.empty(num_experts, dtype=torch.int32, device=device)
    keys = torch.empty((domains, limit + 2), dtype=torch.int64, device=device)
    held = torch.empty((domains, limit, slots, size), dtype=torch.int32, device=device)
    quotas = torch.empty_like(held)
    found = DevicePlan(
        slot_expert=torch.empty((num_ranks, slots), dtype=torch.int32, device=device),
        quota=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        share=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
    )
    _sum_kernel[(triton.cdiv(num_experts, _BLOCK_COLUMNS),)](
        loads,
        loads.stride(0),
        expert_load,
        NUM_RANKS=num_ranks,
        NUM_EXPERTS=num_experts,
        BLOCK_RANKS=_block(num_ranks),
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        num_warps=4,
    )
    shape = {
        "NUM_RANKS": num_ranks,
        "NUM_MASTERS": num_masters,
        "NUM_SLOTS": slots,
        "DOMAIN_SIZE": size,
        "FIRST": search.first,
        "LIMIT": limit,
        "BLOCK_ALL_EXPERTS": _block(num_experts),
        "BLOCK_KEYS": _block(limit),
    }
    for wave in range(2 if limit else 0):
        _attempt_kernel[(domains, limit - search.first if wave else search.first)](
            expert_load,
            keys,
            held,
            quotas,
            **shape,
            GRAIN=search.grain,
            SWEEPS=search.sweeps,
            WAVE=wave,
            BLOCK_EXPERTS=_block(size * num_masters),
            BLOCK_RANKS=_block(size),
            BLOCK_SLOTS=triton.next_power_of_2(slots),
            BLOCK_MASTERS=_BLOCK_MASTERS,
            num_warps=1,
        )
    _finish_kernel[(num_experts,)](
        loads,
        loads.stride(0),
        expert_load,
        keys,
        held,
        quotas,
        found.slot_expert,
        found.quota,
        found.share,
        status,
        source_rank,
        **shape,
        BLOCK_RANKS=_block(num_ranks),
        num_warps=1,
    )
    return found


def _block(size: int) -> int:
    """Width of a tile that one warp reduces in one instruction."""
    return max(32, int(triton.next_power_of_2(size)))
