"""Speeds and times of ranks for the planner's kernels, in the host's integers.

Twins: ``least_time``, ``_capacities`` and ``busiest_time`` in ``host._plan_search``.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import FULL_SPEED

__all__ = ["LONGEST", "busiest", "capacities", "least_time", "speeds_of", "time_of"]

LONGEST = tl.constexpr(1 << 28)  # times that an attempt computes with, and together all loads
_FULL = tl.constexpr(FULL_SPEED)


@triton.jit
def speeds_of(
    speeds_ptr,  # (R,) integers; None where all are equal
    first_rank,
    num_ranks,
    SIZES: tl.constexpr,  # PlanSizes
    BLOCK_RANKS: tl.constexpr,
):
    """(BLOCK_RANKS,) int32: speeds of ``num_ranks`` ranks, the fastest of all at FULL_SPEED."""
    speeds = tl.full((BLOCK_RANKS,), _FULL, tl.int32)
    if speeds_ptr is not None:
        ranks = tl.arange(0, BLOCK_RANKS)
        every = tl.arange(0, SIZES.block_all_ranks)
        all_speeds = tl.load(speeds_ptr + every, mask=every < SIZES.num_ranks, other=1)
        fastest = tl.max(all_speeds, axis=0)
        fastest = tl.maximum(fastest.to(tl.int64), 1)
        own = tl.load(speeds_ptr + first_rank + ranks, mask=ranks < num_ranks, other=1)
        scaled = (own.to(tl.int64) * _FULL + fastest // 2) // fastest
        speeds = tl.maximum(scaled, 1).to(tl.int32)
    return speeds


@triton.jit
def capacities(time, speeds):
    """(R,) int32: assignments that ranks with ``speeds`` (R,) compute by ``time``."""
    return (time.to(tl.int64) * speeds // _FULL).to(tl.int32)


@triton.jit
def time_of(load, speed):
    """int64: the least time by which a rank with ``speed`` computes ``load`` assignments."""
    return (load.to(tl.int64) * _FULL + speed - 1) // speed


@triton.jit
def busiest(rank_load, speeds):
    """int64: the longest time of ``rank_load`` (R,)."""
    return tl.max(time_of(rank_load, speeds), axis=0)


@triton.jit
def least_time(
    expert_load,  # (E,) int32
    speeds,  # (R,) int32
    SIZES: tl.constexpr,
):
    """int64: the least time by which every domain's ranks together compute the domain's loads."""
    experts = tl.arange(0, SIZES.block_all_experts)
    domain_of_expert = experts // (SIZES.num_masters * SIZES.domain_size)
    ranks = tl.arange(0, SIZES.block_all_ranks)
    longest = tl.sum(expert_load, axis=0).to(tl.int64) * 0
    for domain in range(0, SIZES.num_domains):
        is_member = (ranks // SIZES.domain_size == domain) & (ranks < SIZES.num_ranks)
        members = tl.where(is_member, speeds, 0).to(tl.int64)
        together = tl.sum(members, axis=0)
        total = tl.sum(tl.where(domain_of_expert == domain, expert_load, 0), axis=0).to(tl.int64)
        total = tl.maximum(total, 0)  # an impossible load is -1
        number = tl.sum(is_member.to(tl.int64), axis=0)
        low = (total * _FULL + together - 1) // together
        high = low + (number * _FULL + together - 1) // together
        while low < high:  # every rank may lack a part of an assignment
            middle = (low + high) // 2
            enough = tl.sum(middle * members // _FULL, axis=0) >= total
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle + 1)
        longest = tl.maximum(longest, high)
    return longest
