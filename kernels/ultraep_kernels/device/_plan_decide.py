"""What a layer is left alone for, before the search and after it, and which attempt is taken.

Each is one program's work. Twins: the ends of ``_search`` and ``_save`` in ``host._plan_search``,
``ultraep_serve.costs.model``.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import CHECKSUM, FULL_SPEED, POLICY, THRESHOLD, UNKNOWN, Policy
from ultraep_kernels.device._decisions import (
    BALANCED,
    FORCED,
    INCONSISTENT,
    PLANNED,
    POLICY_OFF,
    UNPROFITABLE,
)
from ultraep_kernels.device._plan_attempt import valid_total
from ultraep_kernels.device._plan_times import LONGEST, busiest, least_time, speeds_of
from ultraep_kernels.device.status import IMPOSSIBLE_LOADS, TIMEOUTS

__all__ = ["NO_KEY", "rank_loads", "survey", "take_winners"]

NO_KEY = tl.constexpr((1 << 63) - 1)
_QUOTA, _IDEAL = tl.constexpr(Policy.QUOTA.code), tl.constexpr(Policy.IDEAL.code)
_MILLION = tl.constexpr(10**6)
_FULL = tl.constexpr(FULL_SPEED)
_CHECKSUM = tl.constexpr(CHECKSUM)
_POLICY = tl.constexpr(POLICY)
_THRESHOLD = tl.constexpr(THRESHOLD)
_UNKNOWN = tl.constexpr(UNKNOWN)


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
def survey(
    expert_load_ptr,  # (E,) int32
    speeds_ptr,  # (R,) int32; not read without HAS_SPEEDS
    keys_ptr,  # (domains, LIMIT + THRIFTY + 2) int64; the goal is written
    rows_ptr,  # (R, .) int32: every rank's row, of which the header is read
    stride_rows,
    decision_ptr,  # (1,) int32, out: PLANNED where a search is worth it
    status_ptr,  # (1,) int32
    threshold,  # imbalance up to which nothing is done, in millionths; rank 0's row may overrule it
    per_assignment,  # picoseconds
    per_read,
    per_sent,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    LIMIT: tl.constexpr,  # 0: no attempt is made
    THRIFTY: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_ALL_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
):
    """Everything that can be decided from loads alone."""
    experts = tl.arange(0, BLOCK_ALL_EXPERTS)
    is_expert = experts < NUM_RANKS * NUM_MASTERS
    expert_load = tl.load(expert_load_ptr + experts, mask=is_expert, other=0)
    rank_load = rank_loads(expert_load_ptr, NUM_RANKS, NUM_MASTERS, BLOCK_RANKS, BLOCK_MASTERS)
    speeds = speeds_of(speeds_ptr, 0, NUM_RANKS, NUM_RANKS, HAS_SPEEDS, BLOCK_RANKS, BLOCK_RANKS)
    longest = busiest(rank_load, speeds)
    before = tl.minimum(longest, LONGEST).to(tl.int32)
    least = least_time(
        expert_load,
        speeds,
        NUM_RANKS,
        NUM_MASTERS,
        DOMAIN_SIZE,
        BLOCK_ALL_EXPERTS,
        BLOCK_RANKS,
    )
    if LIMIT > 0:
        goal = least + (least + GRAIN // 2) // GRAIN
        for domain in range(0, (NUM_RANKS + DOMAIN_SIZE - 1) // DOMAIN_SIZE):
            tl.store(keys_ptr + (domain + 1) * (LIMIT + THRIFTY + 2) - 1, goal)
    decision = before * 0 + PLANNED
    if HAS_GATE:
        one = before * 0 + 1
        hoped = _saved(before, least, one, one, per_assignment, per_read, per_sent, NUM_MASTERS)
        decision = tl.where((hoped > 0) & (LIMIT > 0), decision, UNPROFITABLE)
        if HAS_ROWS:
            asked = tl.load(rows_ptr + _THRESHOLD)
            threshold = tl.where(asked >= _MILLION, asked, threshold)
        is_rank = tl.arange(0, BLOCK_RANKS) < NUM_RANKS
        together = tl.sum(tl.where(is_rank, speeds, 0).to(tl.int64), axis=0)
        total = tl.sum(expert_load.to(tl.int64), axis=0)
        whole = tl.maximum(total * _FULL, 1)  # what the busiest rank's time is compared with
        part = before * together
        over = (part % whole * _MILLION + whole - 1) // whole + part // whole * _MILLION
        decision = tl.where(over <= threshold, BALANCED, decision)
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
        decision = tl.where(policy == _IDEAL, FORCED, decision)
        decision = tl.where(inconsistent, INCONSISTENT, decision)
    if (valid_total(expert_load) == 0) | (longest > LONGEST):
        tl.atomic_or(status_ptr, IMPOSSIBLE_LOADS)
        decision = before * 0 + INCONSISTENT
    if HAS_ROWS:
        decision = tl.where((policy == _QUOTA) | (policy == _IDEAL), decision, POLICY_OFF)
    tl.store(decision_ptr, decision)


@triton.jit
def take_winners(
    expert_load_ptr,  # (E,) int32
    speeds_ptr,  # (R,) int32; not read without HAS_SPEEDS
    keys_ptr,  # (domains, LIMIT + THRIFTY + 2) int64
    reached_ptr,  # (domains, LIMIT + THRIFTY, 2) int32
    winners_ptr,  # (domains,) int32, out: attempt to take, -1 the identity
    decision_ptr,  # (1,) int32, out: UNPROFITABLE where what was found does not pay
    per_assignment,  # picoseconds
    per_read,
    per_sent,
    NUM_RANKS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    DOMAIN_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LIMIT: tl.constexpr,
    THRIFTY: tl.constexpr,
    HAS_SPEEDS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_MASTERS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """After the search: the best attempt of every domain, where all of them together pay."""
    rank_load = rank_loads(expert_load_ptr, NUM_RANKS, NUM_MASTERS, BLOCK_RANKS, BLOCK_MASTERS)
    speeds = speeds_of(speeds_ptr, 0, NUM_RANKS, NUM_RANKS, HAS_SPEEDS, BLOCK_RANKS, BLOCK_RANKS)
    before = busiest(rank_load, speeds).to(tl.int32)
    after = before * 0
    sent = before * 0
    received = before * 0
    for domain in range(0, (NUM_RANKS + DOMAIN_SIZE - 1) // DOMAIN_SIZE):
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
        tl.store(winners_ptr + domain, winner)
    if HAS_GATE:
        link = tl.maximum(sent, received)
        saved = _saved(
            before, after, link, received, per_assignment, per_read, per_sent, NUM_MASTERS
        )
        tl.store(decision_ptr, tl.where(saved > 0, PLANNED, UNPROFITABLE))
