"""The planner's search: sum the loads, survey them, attempt, take the best.

Programs that add up loads come first; the last of them to arrive surveys (``_plan_decide``), and a
layer that can be left alone is. Then one program makes each attempt: those of the first wave and
the thrifty ones, then those of the second, which return at once where the first reached the goal.
Whoever arrives last takes the winners, and what was decided stands. An attempt leaves a key that
sorts attempts by what the planner minimises: the busiest rank's time (not below the goal), the
replicas sent by one rank, the replicas.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._decisions import PLANNED, is_off
from ultraep_kernels.device._plan_attempt import attempt, count_replicas, relax
from ultraep_kernels.device._plan_decide import NO_KEY, rank_loads, survey, take_winners
from ultraep_kernels.device._plan_times import busiest, speeds_of
from ultraep_kernels.device._turns import arrive, await_arrivals

__all__ = ["await_decision", "search"]

# arrivals, each a counter of the launch
_SUMMED, _SURVEYED, _FIRST_WAVE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_ATTEMPTED, _DECIDED = tl.constexpr(4), tl.constexpr(5)


@triton.jit
def _add_up(
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32, out; -1 where an expert's loads are impossible
    first_column,
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    ranks = tl.arange(0, BLOCK_RANKS)
    mask = (ranks < NUM_RANKS)[:, None] & (columns < NUM_EXPERTS)[None, :]
    offsets = ranks.to(tl.int64)[:, None] * stride_rank + columns[None, :]
    loads = tl.load(loads_ptr + offsets, mask=mask, other=0).to(tl.int64)
    total = tl.sum(loads, axis=0)
    valid = (tl.min(loads, axis=0) >= 0) & (total < (1 << 31))
    load = tl.where(valid, total, -1).to(tl.int32)
    tl.store(expert_load_ptr + columns, load, mask=columns < NUM_EXPERTS)


@triton.jit
def _attempt(
    domain,
    number,  # of the attempt; from LIMIT on it is thrifty
    is_second,  # whether it belongs to the second wave
    expert_load_ptr,
    speeds_ptr,
    keys_ptr,
    held_ptr,
    quotas_ptr,
    reached_ptr,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    SWEEPS: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    BLOCK_ALL_RANKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    first_rank = domain * DOMAIN_SIZE
    num_ranks = tl.minimum(DOMAIN_SIZE, NUM_RANKS - first_rank)
    own_ptr = expert_load_ptr + first_rank * NUM_MASTERS
    rank_load = rank_loads(own_ptr, num_ranks, NUM_MASTERS, BLOCK_RANKS, BLOCK_MASTERS)
    speeds = speeds_of(
        speeds_ptr, first_rank, num_ranks, NUM_RANKS, HAS_SPEEDS, BLOCK_ALL_RANKS, BLOCK_RANKS
    )
    worst = busiest(rank_load, speeds)
    row_ptr = keys_ptr + domain * (LIMIT + THRIFTY + 2)
    goal = tl.load(row_ptr + LIMIT + THRIFTY + 1)
    numbers = tl.arange(0, BLOCK_KEYS)
    made = tl.where(is_second, FIRST, 0)
    keys = tl.load(row_ptr + numbers, mask=numbers < made, other=NO_KEY)
    best = tl.minimum(tl.min(keys, axis=0) >> 32, worst)  # the identity, in the first wave
    needed = best > goal
    gap = tl.where(is_second, tl.maximum(best - goal, 0), 0)
    if number == 0:
        tl.store(row_ptr + LIMIT + THRIFTY, worst << 32)
    key = worst * 0 + NO_KEY
    if needed:
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


@triton.jit
def search(
    turn,  # of this program, below NUM_SUMS and the number of attempts of all domains
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32, out
    speeds_ptr,  # (R,) int32; not read without HAS_SPEEDS
    keys_ptr,  # (domains, LIMIT + THRIFTY + 2) int64: of attempts, of the identity, and the goal
    held_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    quotas_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    reached_ptr,  # (domains, LIMIT + THRIFTY, 2) int32: busiest rank's time, most replicas on one
    rows_ptr,  # (R, .) int32; not read without HAS_ROWS
    stride_rows,
    winners_ptr,  # (domains,) int32, out
    decision_ptr,  # (1,) int32, in: of the layer before; out
    status_ptr,  # (1,) int32
    turns_ptr,  # counters of the launch
    threshold,
    per_assignment,
    per_read,
    per_sent,
    begins,  # whether the layer is its batch's first; without HAS_ROWS always
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    SWEEPS: tl.constexpr,
    NUM_SUMS: tl.constexpr,  # programs that add up
    NUM_DOMAINS: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_ALL_RANKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One program's part."""
    if turn < NUM_SUMS:
        rests = is_off(decision_ptr, begins, HAS_ROWS)
        if rests == 0:
            _add_up(
                loads_ptr,
                stride_rank,
                expert_load_ptr,
                turn * BLOCK_COLUMNS,
                NUM_RANKS,
                NUM_RANKS * NUM_MASTERS,
                BLOCK_ALL_RANKS,
                BLOCK_COLUMNS,
            )
        if arrive(turns_ptr + _SUMMED) == NUM_SUMS - 1:
            if rests == 0:
                survey(
                    expert_load_ptr,
                    speeds_ptr,
                    keys_ptr,
                    rows_ptr,
                    stride_rows,
                    decision_ptr,
                    status_ptr,
                    threshold,
                    per_assignment,
                    per_read,
                    per_sent,
                    NUM_RANKS,
                    NUM_MASTERS,
                    DOMAIN_SIZE,
                    GRAIN,
                    LIMIT,
                    THRIFTY,
                    HAS_SPEEDS,
                    HAS_ROWS,
                    HAS_GATE,
                    BLOCK_ALL_EXPERTS,
                    BLOCK_ALL_RANKS,
                    BLOCK_MASTERS,
                )
            arrive(turns_ptr + _SURVEYED)
    elif LIMIT > 0:
        await_arrivals(turns_ptr + _SURVEYED, 1)
        first_wave: tl.constexpr = NUM_DOMAINS * (FIRST + THRIFTY)
        index = turn - NUM_SUMS
        is_second = index >= first_wave
        # thrifty attempts are made with the first wave, and numbered after the second
        early = index % (FIRST + THRIFTY)
        early = tl.where(early < FIRST, early, early - FIRST + LIMIT)
        late = FIRST + (index - first_wave) % (LIMIT - FIRST)
        domain = tl.where(
            is_second, (index - first_wave) // (LIMIT - FIRST), index // (FIRST + THRIFTY)
        )
        if tl.load(decision_ptr) == PLANNED:
            if is_second:
                await_arrivals(turns_ptr + _FIRST_WAVE, first_wave)
            _attempt(
                domain,
                tl.where(is_second, late, early),
                is_second,
                expert_load_ptr,
                speeds_ptr,
                keys_ptr,
                held_ptr,
                quotas_ptr,
                reached_ptr,
                NUM_RANKS,
                NUM_MASTERS,
                NUM_SLOTS,
                DOMAIN_SIZE,
                GRAIN,
                FIRST,
                LIMIT,
                THRIFTY,
                SWEEPS,
                HAS_SPEEDS,
                BLOCK_ALL_RANKS,
                BLOCK_EXPERTS,
                BLOCK_RANKS,
                BLOCK_SLOTS,
                BLOCK_MASTERS,
                BLOCK_KEYS,
            )
            if is_second == 0:
                arrive(turns_ptr + _FIRST_WAVE)
            if arrive(turns_ptr + _ATTEMPTED) == NUM_DOMAINS * (LIMIT + THRIFTY) - 1:
                take_winners(
                    expert_load_ptr,
                    speeds_ptr,
                    keys_ptr,
                    reached_ptr,
                    winners_ptr,
                    decision_ptr,
                    per_assignment,
                    per_read,
                    per_sent,
                    NUM_RANKS,
                    NUM_MASTERS,
                    DOMAIN_SIZE,
                    FIRST,
                    LIMIT,
                    THRIFTY,
                    HAS_SPEEDS,
                    HAS_GATE,
                    BLOCK_ALL_RANKS,
                    BLOCK_MASTERS,
                    BLOCK_KEYS,
                )
                arrive(turns_ptr + _DECIDED)


@triton.jit
def await_decision(decision_ptr, turns_ptr, HAS_ATTEMPTS: tl.constexpr):
    """What the search comes to, for programs behind it; a layer left alone is known earlier.

    Who takes the winners may write while it is read here: programs of one warp see one value.
    """
    await_arrivals(turns_ptr + _SURVEYED, 1)
    decision = tl.load(decision_ptr)
    if (decision == PLANNED) & HAS_ATTEMPTS:
        await_arrivals(turns_ptr + _DECIDED, 1)
        decision = tl.load(decision_ptr)
    return decision
