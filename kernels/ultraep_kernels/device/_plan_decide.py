"""What a layer is left alone for, before the search and after it, and which attempt is taken.

Each is one program's work. Twins: the ends of ``_search`` and ``_save`` in ``host._plan_search``,
``ultraep_serve.costs.model``.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import CHECKSUM, FULL_SPEED, POLICY, UNKNOWN, Policy
from ultraep_kernels.device._plan_times import LONGEST, least_time, speeds_of, time_of
from ultraep_kernels.device._signals import peek, put
from ultraep_kernels.device.reroute import every_32nd
from ultraep_kernels.device.status import (
    BALANCED,
    FORCED,
    IMPOSSIBLE_LOADS,
    INCONSISTENT,
    PLANNED,
    POLICY_OFF,
    TIMEOUTS,
    UNPROFITABLE,
)

NO_KEY = tl.constexpr((1 << 63) - 1)
_QUOTA, _IDEAL = tl.constexpr(Policy.QUOTA.code), tl.constexpr(Policy.IDEAL.code)
_MILLION = tl.constexpr(10**6)
_FULL = tl.constexpr(FULL_SPEED)
_CHECKSUM = tl.constexpr(CHECKSUM)
_POLICY = tl.constexpr(POLICY)
_UNKNOWN = tl.constexpr(UNKNOWN)


@triton.jit
def rank_loads(expert_load_ptr, SIZES: tl.constexpr):
    """(R,) assignments per rank when every expert is computed by its master."""
    ranks = tl.arange(0, SIZES.block_all_ranks)
    rank_load = tl.full((SIZES.block_all_ranks,), 0, tl.int32)
    for start in range(0, SIZES.num_masters, SIZES.masters_at_once):
        masters = start + tl.arange(0, SIZES.masters_at_once)
        mask = (masters < SIZES.num_masters)[:, None] & (ranks < SIZES.num_ranks)[None, :]
        offsets = ranks[None, :] * SIZES.num_masters + masters[:, None]
        rank_load += tl.sum(tl.load(expert_load_ptr + offsets, mask=mask, other=0), axis=0)
    return rank_load


@triton.jit
def _first_reached(row_ptr, goal, SIZES: tl.constexpr):
    """Whether a domain is at the goal once the first wave is over."""
    numbers = tl.arange(0, SIZES.block_keys)
    keys = tl.load(row_ptr + numbers, mask=numbers < SIZES.search.first, other=NO_KEY)
    identity = tl.load(row_ptr + SIZES.num_attempts)
    return tl.minimum(tl.min(keys, axis=0), identity) >> 32 <= goal


@triton.jit
def is_reached(attempts, SIZES: tl.constexpr):
    """Whether the first wave reached the goal in every domain, so that no second one is made."""
    goal = tl.load(attempts.goal)
    reached = goal >= 0
    for domain in range(0, SIZES.num_domains):
        row_ptr = attempts.keys + domain * (SIZES.num_attempts + 1)
        reached = reached & _first_reached(row_ptr, goal, SIZES)
    return reached


@triton.jit
def _winner(row_ptr, goal, SIZES: tl.constexpr):
    """The attempt that the CPU's search, one after another, would have kept; -1 the identity."""
    LIMIT: tl.constexpr = SIZES.search.limit
    THRIFTY: tl.constexpr = SIZES.search.thrifty
    numbers = tl.arange(0, SIZES.block_keys)
    identity = tl.load(row_ptr + SIZES.num_attempts)
    both = _first_reached(row_ptr, goal, SIZES) == 0  # the second wave ran as well
    made = tl.where(both, LIMIT, SIZES.search.first)
    keys = tl.load(row_ptr + numbers, mask=numbers < made, other=NO_KEY)
    reached = both & (keys >> 32 <= goal)  # the search ends with the first of these
    ends = tl.min(tl.where(reached, numbers, SIZES.block_keys), axis=0)
    least = tl.min(keys, axis=0)
    lowest = tl.min(tl.where(keys == least, numbers, SIZES.block_keys), axis=0)
    winner = tl.where(ends < SIZES.block_keys, ends, lowest)
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
    return (key >> 16) & 0xFFFF


@triton.jit
def _total_of(key):
    return key & 0xFFFF


@triton.jit
def saved_time(before, after, link, received, gate, NUM_MASTERS: tl.constexpr):
    """Picoseconds that a plan saves; as ``saved_picoseconds`` on the host."""
    zero = before.to(tl.int64) * 0
    read = (NUM_MASTERS + zero) * gate.per_read
    unbalanced = tl.maximum((before + zero) * gate.per_assignment, read)
    held = received + zero + NUM_MASTERS
    balanced = tl.maximum((after + zero) * gate.per_assignment, held * gate.per_read)
    return unbalanced - balanced - (link + zero) * gate.per_sent


@triton.jit
def survey(
    given,
    attempts,  # ranks, the goal and the identity's keys are written
    found,  # as is the decision: PLANNED where a search is worth it
    SIZES: tl.constexpr,
):
    """Everything that can be decided from loads alone."""
    rows, gate, status_ptr = given.rows, given.gate, given.status
    LIMIT: tl.constexpr = SIZES.search.limit  # 0: no attempt is made
    experts = tl.arange(0, SIZES.block_all_experts)
    is_expert = experts < SIZES.num_experts
    expert_load = tl.load(found.expert_load + experts, mask=is_expert, other=0)
    ranks = every_32nd(SIZES.block_all_ranks)
    exists = ranks < SIZES.num_ranks
    rank_load = rank_loads(found.expert_load, SIZES)
    speeds = speeds_of(given, SIZES.measures_speeds, SIZES.num_ranks, SIZES.block_all_ranks)
    tl.store(attempts.ranks + ranks * 2, rank_load, mask=exists)
    tl.store(attempts.ranks + ranks * 2 + 1, speeds, mask=exists)
    times = time_of(rank_load, speeds)
    longest = tl.max(times, axis=0)
    before = tl.minimum(longest, LONGEST).to(tl.int32)
    least = longest * 0
    for domain in range(0, SIZES.num_domains):
        is_member = exists & (ranks // SIZES.domain_size == domain)
        worst = tl.max(tl.where(is_member, times, 0), axis=0)
        tl.store(attempts.keys + (domain + 1) * (SIZES.num_attempts + 1) - 1, worst << 32)
        least = tl.maximum(least, least_time(rank_load, tl.where(is_member, speeds, 0)))
    tl.store(attempts.goal, least + (least + SIZES.search.grain // 2) // SIZES.search.grain)
    decision = before * 0 + PLANNED
    if gate is not None:
        one = before * 0 + 1
        hoped = saved_time(before, least, one, one, gate, SIZES.num_masters)
        if not SIZES.keeps:  # else what is there already may do
            decision = tl.where((hoped > 0) & (LIMIT > 0), decision, UNPROFITABLE)
        together = tl.sum(tl.where(exists, speeds, 0), axis=0).to(tl.int64)
        total = tl.sum(rank_load, axis=0).to(tl.int64)
        whole = tl.maximum(total * _FULL, 1)  # what the busiest rank's time is compared with
        part = before * together
        over = (part % whole * _MILLION + whole - 1) // whole + part // whole * _MILLION
        decision = tl.where(over <= gate.max_imbalance, BALANCED, decision)
    if rows is not None:
        row_ptr = rows.table + ranks * rows.stride
        first = tl.load(rows.table + _CHECKSUM)
        unknown = tl.load(row_ptr + _UNKNOWN, mask=exists, other=0)
        checksum = tl.load(row_ptr + _CHECKSUM, mask=exists, other=first)
        inconsistent = tl.max(((unknown != 0) | (checksum != first)).to(tl.int32), axis=0) > 0
        never_came = (peek(status_ptr) & TIMEOUTS) != 0  # as rows may have
        inconsistent = inconsistent | never_came
        policy = tl.load(rows.table + _POLICY)
        decision = tl.where(policy == _IDEAL, FORCED, decision)
        decision = tl.where(inconsistent, INCONSISTENT, decision)
    all_loads = tl.sum(expert_load.to(tl.int64), axis=0)
    if (tl.min(expert_load, axis=0) < 0) | (all_loads > LONGEST) | (longest > LONGEST):
        tl.atomic_or(status_ptr, IMPOSSIBLE_LOADS)
        decision = before * 0 + INCONSISTENT
    if rows is not None:
        decision = tl.where((policy == _QUOTA) | (policy == _IDEAL), decision, POLICY_OFF)
    tl.store(found.decision, decision)


@triton.jit
def take_best(attempts, SIZES: tl.constexpr):
    """The best attempt of every domain: the winners are written.

    Returns times before and after, copies sent and received by one rank at most, int32.
    """
    goal = tl.load(attempts.goal)
    after = goal.to(tl.int32) * 0
    before, sent, received = after, after, after
    for domain in range(0, SIZES.num_domains):
        row_ptr = attempts.keys + domain * (SIZES.num_attempts + 1)
        winner = _winner(row_ptr, goal, SIZES)
        worst = (tl.load(row_ptr + SIZES.num_attempts) >> 32).to(tl.int32)
        before = tl.maximum(before, worst)
        if winner >= 0:
            index = (domain * SIZES.num_attempts + winner) * 2
            after = tl.maximum(after, tl.load(attempts.reached + index))
            received = tl.maximum(received, tl.load(attempts.reached + index + 1))
            sent = tl.maximum(sent, _sent_of(tl.load(row_ptr + winner)).to(tl.int32))
        else:
            after = tl.maximum(after, worst)
        tl.store(attempts.winners + domain, winner)
    return before, after, sent, received


@triton.jit
def take_winners(
    gate,  # GateValues, or None
    attempts,  # the winners are written
    found,  # the decision is UNPROFITABLE where what was found does not pay
    SIZES: tl.constexpr,
):
    """After the search: the best attempt of every domain, where all of them together pay."""
    before, after, sent, received = take_best(attempts, SIZES)
    if gate is not None:
        link = tl.maximum(sent, received)
        saved = saved_time(before, after, link, received, gate, SIZES.num_masters)
        put(found.decision, tl.where(saved > 0, PLANNED, UNPROFITABLE))  # others may look
