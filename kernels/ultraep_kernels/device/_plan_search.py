"""Kernels of the planner's search: loads -> expert loads, and one attempt per program.

An attempt leaves a key that sorts attempts by what the planner minimises: the busiest rank's time
(not below the goal), the replicas sent by one rank, the replicas.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._plan_attempt import attempt, count_replicas, relax, valid_total
from ultraep_kernels.device._plan_times import LONGEST, busiest, least_time, speeds_of

__all__ = ["NO_KEY", "attempt_kernel", "rank_loads", "sum_kernel"]

NO_KEY = tl.constexpr((1 << 63) - 1)


@triton.jit
def sum_kernel(
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
    valid = (tl.min(loads, axis=0) >= 0) & (total < (1 << 31))
    load = tl.where(valid, total, -1).to(tl.int32)
    tl.store(expert_load_ptr + columns, load, mask=columns < NUM_EXPERTS)


@triton.jit
def rank_loads(
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
def attempt_kernel(
    expert_load_ptr,  # (E,) int32
    speeds_ptr,  # (R,) int32; not read without HAS_SPEEDS
    keys_ptr,  # (domains, LIMIT + THRIFTY + 2) int64: of attempts, of the identity, and the goal
    held_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    quotas_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    reached_ptr,  # (domains, LIMIT + THRIFTY, 2) int32: busiest rank's time, most replicas on one
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    SWEEPS: tl.constexpr,
    WAVE: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_ALL_RANKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    domain = tl.program_id(0)
    number = tl.program_id(1) + WAVE * FIRST
    if WAVE == 0:  # thrifty attempts are made with the first wave, and numbered after the second
        number = tl.where(number < FIRST, number, number - FIRST + LIMIT)
    first_rank = domain * DOMAIN_SIZE
    num_ranks = tl.minimum(DOMAIN_SIZE, NUM_RANKS - first_rank)
    all_experts = tl.arange(0, BLOCK_ALL_EXPERTS)
    exists = all_experts < NUM_RANKS * NUM_MASTERS
    every_load = tl.load(expert_load_ptr + all_experts, mask=exists, other=0)
    every_speed = speeds_of(
        speeds_ptr, 0, NUM_RANKS, NUM_RANKS, HAS_SPEEDS, BLOCK_ALL_RANKS, BLOCK_ALL_RANKS
    )
    goal = least_time(
        every_load,
        every_speed,
        NUM_RANKS,
        NUM_MASTERS,
        DOMAIN_SIZE,
        BLOCK_ALL_EXPERTS,
        BLOCK_ALL_RANKS,
    )
    goal += (goal + GRAIN // 2) // GRAIN
    own_ptr = expert_load_ptr + first_rank * NUM_MASTERS
    rank_load = rank_loads(own_ptr, num_ranks, NUM_MASTERS, BLOCK_RANKS, BLOCK_MASTERS)
    speeds = speeds_of(
        speeds_ptr, first_rank, num_ranks, NUM_RANKS, HAS_SPEEDS, BLOCK_ALL_RANKS, BLOCK_RANKS
    )
    worst = busiest(rank_load, speeds)
    is_possible = valid_total(every_load) & (worst <= LONGEST)
    row_ptr = keys_ptr + domain * (LIMIT + THRIFTY + 2)
    gap = worst * 0
    if WAVE == 1:
        numbers = tl.arange(0, BLOCK_KEYS)
        keys = tl.load(row_ptr + numbers, mask=numbers < FIRST, other=NO_KEY)
        best = tl.minimum(tl.min(keys, axis=0) >> 32, worst)
        gap = tl.maximum(best - goal, 0)
        needed = gap > 0
    else:
        needed = worst > goal
        if number == 0:
            tl.store(row_ptr + LIMIT + THRIFTY, worst << 32)
            tl.store(row_ptr + LIMIT + THRIFTY + 1, goal)
    key = worst * 0 + NO_KEY
    if needed & is_possible:
        experts = tl.arange(0, BLOCK_EXPERTS)
        mine = experts < num_ranks * NUM_MASTERS
        left = tl.load(own_ptr + experts, mask=mine, other=0)
        is_thrifty = number >= LIMIT
        above = tl.where(is_thrifty, (number - LIMIT) * goal // GRAIN, gap * (number // 2 % 5) // 4)
        threshold = (goal + above).to(tl.int32)
        enough = goal.to(tl.int32)
        loads, left, held, quotas = attempt(
            threshold,
            (number % 2 == 0) & (number < LIMIT),
            number < LIMIT,
            tl.where(is_thrifty, 0, number // 2),
            speeds,
            rank_load,
            left,
            num_ranks,
            NUM_MASTERS,
            NUM_SLOTS,
            BLOCK_RANKS,
            BLOCK_EXPERTS,
            BLOCK_SLOTS,
        )
        time = busiest(loads, speeds).to(tl.int32)
        if (time > enough) & (number < LIMIT):
            loads, held, quotas = relax(
                speeds,
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
            time = busiest(loads, speeds).to(tl.int32)
        sent, total = count_replicas(held, NUM_MASTERS, BLOCK_RANKS, BLOCK_SLOTS)
        key = (tl.maximum(time, enough).to(tl.int64) << 32) | (sent.to(tl.int64) << 16) | total
        key = tl.where(is_thrifty & (time > threshold), NO_KEY, key)
        received = tl.max(tl.sum((held >= 0).to(tl.int32), axis=0), axis=0)
        index = (domain * (LIMIT + THRIFTY) + number) * 2
        tl.store(reached_ptr + index, time)
        tl.store(reached_ptr + index + 1, received)
        ranks = tl.arange(0, BLOCK_RANKS)
        slots = tl.arange(0, BLOCK_SLOTS)
        mask = (slots < NUM_SLOTS)[:, None] & (ranks < num_ranks)[None, :]
        start = (domain * (LIMIT + THRIFTY) + number).to(tl.int64) * (NUM_SLOTS * DOMAIN_SIZE)
        offsets = start + slots[:, None] * DOMAIN_SIZE + ranks[None, :]
        held = tl.where(held >= 0, held + first_rank * NUM_MASTERS, -1)
        tl.store(held_ptr + offsets, held, mask=mask)
        tl.store(quotas_ptr + offsets, quotas, mask=mask)
    tl.store(row_ptr + number, key)
