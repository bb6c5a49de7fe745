"""Kernels that end the planner: which attempt to take, whether it pays, and the plan in full.

Twins: the ends of ``_search`` and ``_save`` in ``host._plan_search``,
``ultraep_serve.costs.model``, and ``host._plan_share``.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import (
    CHECKSUM,
    FULL_SPEED,
    POLICY,
    THRESHOLD,
    UNKNOWN,
    Decision,
    Policy,
)
from ultraep_kernels.device._plan_attempt import valid_total
from ultraep_kernels.device._plan_search import NO_KEY, rank_loads
from ultraep_kernels.device._plan_times import LONGEST, busiest, least_time, speeds_of
from ultraep_kernels.device.status import IMPOSSIBLE_LOADS, TIMEOUTS

__all__ = ["decide_kernel", "finish_kernel"]

_PLANNED, _FORCED = tl.constexpr(int(Decision.PLANNED)), tl.constexpr(int(Decision.FORCED))
_POLICY_OFF = tl.constexpr(int(Decision.POLICY_OFF))
_BALANCED = tl.constexpr(int(Decision.BALANCED))
_INCONSISTENT = tl.constexpr(int(Decision.INCONSISTENT))
_UNPROFITABLE = tl.constexpr(int(Decision.UNPROFITABLE))
_QUOTA, _IDEAL = tl.constexpr(Policy.QUOTA.code), tl.constexpr(Policy.IDEAL.code)
_MILLION = tl.constexpr(10**6)
_FULL = tl.constexpr(FULL_SPEED)
_CHECKSUM = tl.constexpr(CHECKSUM)
_POLICY = tl.constexpr(POLICY)
_THRESHOLD = tl.constexpr(THRESHOLD)
_UNKNOWN = tl.constexpr(UNKNOWN)


@triton.jit
def _winner(
    row_ptr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The attempt that the CPU's search, one after another, would have kept; -1 the identity."""
    numbers = tl.arange(0, BLOCK_KEYS)
    identity = tl.load(row_ptr + LIMIT + THRIFTY)
    goal = tl.load(row_ptr + LIMIT + THRIFTY + 1)
    first_keys = tl.load(row_ptr + numbers, mask=numbers < FIRST, other=NO_KEY)
    least = tl.min(first_keys, axis=0)
    both = tl.minimum(least, identity) >> 32 > goal  # the second wave ran as well
    made = tl.where(both, LIMIT, FIRST)
    keys = tl.load(row_ptr + numbers, mask=numbers < made, other=NO_KEY)
    reached = both & (keys >> 32 <= goal)  # the search ends with the first of these
    ends = tl.min(tl.where(reached, numbers, BLOCK_KEYS), axis=0)
    least = tl.min(keys, axis=0)
    lowest = tl.min(tl.where(keys == least, numbers, BLOCK_KEYS), axis=0)
    winner = tl.where(ends < BLOCK_KEYS, ends, lowest)
    winner = tl.where(least < identity, winner, -1)
    best = tl.load(row_ptr + tl.maximum(winner, 0))
    within = tl.load(row_ptr + LIMIT + numbers, mask=numbers < THRIFTY, other=NO_KEY) != NO_KEY
    first = tl.min(tl.where(within, numbers, THRIFTY), axis=0)  # its threshold is the lowest
    saving = tl.load(row_ptr + LIMIT + first)  # without any, of the identity: no replicas
    saves = (_total_of(saving) > 0) & (_total_of(saving) < _total_of(best))
    saves = saves & (_sent_of(saving) <= _sent_of(best)) & (winner >= 0)
    return tl.where(saves, LIMIT + first, winner)


@triton.jit
def _sent_of(key):
    """Replicas that one rank sends, at most."""
    return (key >> 16) & 0xFFFF


@triton.jit
def _total_of(key):
    return key & 0xFFFF


@triton.jit
def _saved(
    before, after, link, received, per_assignment, per_read, per_sent, NUM_MASTERS: tl.constexpr
):
    """Picoseconds that a plan saves, but for planning; as ``saved_picoseconds`` on the host."""
    zero = before.to(tl.int64) * 0
    unbalanced = tl.maximum((before + zero) * per_assignment, (NUM_MASTERS + zero) * per_read)
    held = received + zero + NUM_MASTERS
    balanced = tl.maximum((after + zero) * per_assignment, held * per_read)
    return unbalanced - balanced - (link + zero) * per_sent


@triton.jit
def decide_kernel(
    expert_load_ptr,  # (E,) int32
    speeds_ptr,  # (R,) int32; not read without HAS_SPEEDS
    keys_ptr,  # (domains, LIMIT + THRIFTY + 2) int64
    reached_ptr,  # (domains, LIMIT + THRIFTY, 2) int32
    rows_ptr,  # (R, .) int32: every rank's row, of which the header is read
    stride_rows,
    winners_ptr,  # (domains,) int32, out: attempt to take, -1 the identity
    decision_ptr,  # (1,) int32, out
    status_ptr,  # (1,) int32
    threshold,  # imbalance up to which nothing is done, in millionths; rank 0's row may overrule it
    per_assignment,  # picoseconds
    per_read,
    per_sent,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: no attempt was made
    THRIFTY: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    experts = tl.arange(0, BLOCK_ALL_EXPERTS)
    is_expert = experts < NUM_RANKS * NUM_MASTERS
    expert_load = tl.load(expert_load_ptr + experts, mask=is_expert, other=0)
    total = tl.sum(expert_load.to(tl.int64), axis=0)
    rank_load = rank_loads(expert_load_ptr, NUM_RANKS, NUM_MASTERS, BLOCK_RANKS, BLOCK_MASTERS)
    speeds = speeds_of(speeds_ptr, 0, NUM_RANKS, NUM_RANKS, HAS_SPEEDS, BLOCK_RANKS, BLOCK_RANKS)
    longest = busiest(rank_load, speeds)
    before = tl.minimum(longest, LONGEST).to(tl.int32)
    after = before * 0
    sent = before * 0
    received = before * 0
    for domain in range(0, (NUM_RANKS + DOMAIN_SIZE - 1) // DOMAIN_SIZE):
        winner = before * 0 - 1
        if LIMIT > 0:
            row_ptr = keys_ptr + domain * (LIMIT + THRIFTY + 2)
            winner = _winner(row_ptr, FIRST, LIMIT, THRIFTY, BLOCK_KEYS)
            if winner >= 0:
                index = (domain * (LIMIT + THRIFTY) + winner) * 2
                after = tl.maximum(after, tl.load(reached_ptr + index))
                received = tl.maximum(received, tl.load(reached_ptr + index + 1))
                sent = tl.maximum(sent, _sent_of(tl.load(row_ptr + winner)).to(tl.int32))
            else:
                worst = tl.load(row_ptr + LIMIT + THRIFTY) >> 32
                after = tl.maximum(after, worst.to(tl.int32))
        else:
            after = before
        tl.store(winners_ptr + domain, winner)
    decision = before * 0 + _PLANNED
    if HAS_GATE:
        least = least_time(
            expert_load,
            speeds,
            NUM_RANKS,
            NUM_MASTERS,
            DOMAIN_SIZE,
            BLOCK_ALL_EXPERTS,
            BLOCK_RANKS,
        )
        one = before * 0 + 1
        hoped = _saved(before, least, one, one, per_assignment, per_read, per_sent, NUM_MASTERS)
        link = tl.maximum(sent, received)
        saved = _saved(
            before, after, link, received, per_assignment, per_read, per_sent, NUM_MASTERS
        )
        pays = (hoped > 0) & (saved > 0)
        decision = tl.where(pays, _PLANNED, _UNPROFITABLE)
        if HAS_ROWS:
            asked = tl.load(rows_ptr + _THRESHOLD)
            threshold = tl.where(asked >= _MILLION, asked, threshold)
        is_rank = tl.arange(0, BLOCK_RANKS) < NUM_RANKS
        together = tl.sum(tl.where(is_rank, speeds, 0).to(tl.int64), axis=0)
        whole = tl.maximum(total * _FULL, 1)  # what the busiest rank's time is compared with
        part = before * together
        over = (part % whole * _MILLION + whole - 1) // whole + part // whole * _MILLION
        decision = tl.where(over <= threshold, _BALANCED, decision)
    if HAS_ROWS:
        ranks = tl.arange(0, BLOCK_RANKS)
        exists = ranks < NUM_RANKS
        first = tl.load(rows_ptr + _CHECKSUM)
        unknown = tl.load(rows_ptr + ranks * stride_rows + _UNKNOWN, mask=exists, other=0)
        checksum = tl.load(rows_ptr + ranks * stride_rows + _CHECKSUM, mask=exists, other=first)
        inconsistent = tl.max(((unknown != 0) | (checksum != first)).to(tl.int32), axis=0) > 0
        inconsistent = inconsistent | (
            (tl.load(status_ptr) & TIMEOUTS) != 0
        )  # rows may never have come
        policy = tl.load(rows_ptr + _POLICY)
        decision = tl.where(policy == _IDEAL, _FORCED, decision)
        decision = tl.where(inconsistent, _INCONSISTENT, decision)
    if (valid_total(expert_load) == 0) | (longest > LONGEST):
        tl.atomic_or(status_ptr, IMPOSSIBLE_LOADS)
        decision = before * 0 + _INCONSISTENT
    if HAS_ROWS:
        decision = tl.where((policy == _QUOTA) | (policy == _IDEAL), decision, _POLICY_OFF)
    tl.store(decision_ptr, decision)


@triton.jit
def finish_kernel(
    loads_ptr,  # (R, E) integers
    stride_rank,
    expert_load_ptr,  # (E,) int32
    winners_ptr,  # (domains,) int32
    decision_ptr,  # (1,) int32
    held_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    quotas_ptr,  # (domains, LIMIT + THRIFTY, S, D) int32
    slot_expert_ptr,  # (R, S) int32, out
    quota_ptr,  # (E, R) int32, out
    share_ptr,  # (E, R) int32, out
    source,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    expert = tl.program_id(0)
    owner = expert // NUM_MASTERS
    domain = owner // DOMAIN_SIZE
    ranks = tl.arange(0, BLOCK_RANKS)
    exists = ranks < NUM_RANKS
    decision = tl.load(decision_ptr)
    winner = tl.load(winners_ptr + domain)
    winner = tl.where(decision == _PLANNED, winner, -1)
    local = ranks - domain * DOMAIN_SIZE
    inside = exists & (local >= 0) & (local < tl.where(winner >= 0, DOMAIN_SIZE, 0))
    start = (domain * (LIMIT + THRIFTY) + winner).to(tl.int64) * (NUM_SLOTS * DOMAIN_SIZE)
    quota = tl.zeros((BLOCK_RANKS,), tl.int32)
    for slot in tl.static_range(NUM_SLOTS):
        offsets = start + slot * DOMAIN_SIZE + local
        held = tl.load(held_ptr + offsets, mask=inside, other=-1)
        amount = tl.load(quotas_ptr + offsets, mask=inside, other=0)
        quota += tl.where(held == expert, amount, 0)
        if expert % NUM_MASTERS == 0:  # one expert of each rank writes what the rank holds
            mine = ranks == owner
            tl.store(slot_expert_ptr + ranks * NUM_SLOTS + slot, held, mask=mine)
    expert_load = tl.maximum(tl.load(expert_load_ptr + expert), 0)
    quota += tl.where(ranks == owner, expert_load - tl.sum(quota, axis=0), 0)
    column_ptr = loads_ptr + ranks.to(tl.int64) * stride_rank + expert
    loads = tl.load(column_ptr, mask=exists, other=0).to(tl.int32)
    share = _spread(loads, quota, ranks, expert, source, NUM_RANKS)
    own = tl.sum(tl.where(ranks == source, loads, 0), axis=0)
    share = tl.where(decision == _PLANNED, share, tl.where(ranks == owner, own, 0))
    tl.store(quota_ptr + expert * NUM_RANKS + ranks, quota, mask=exists)
    tl.store(share_ptr + expert * NUM_RANKS + ranks, share, mask=exists)


@triton.jit
def _spread(loads, quota, ranks, expert, source, NUM_RANKS: tl.constexpr):
    """(R,) what ``source`` sends where of one expert; twin ``_spread`` in host/_plan_share.py."""
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
