"""Speeds and times of ranks for the planner's kernels, in the host's integers.

Twins: ``least_time``, ``_capacities`` and ``busiest_time`` in ``host._plan_search``. Divisions are
of 32 bits, which take a fifth of the instructions of those of 64.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import FULL_SPEED

__all__ = ["FULL", "LONGEST", "busiest", "capacities", "least_time", "speeds_of", "time_of"]

LONGEST = tl.constexpr(1 << 28)  # times that an attempt computes with, and together all loads
FULL = tl.constexpr(FULL_SPEED)


@triton.jit
def speeds_of(
    speeds_ptr,  # (R,) integers; None where all are equal
    num_ranks: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """(BLOCK_RANKS,) int32: speeds of all ranks, the fastest at FULL_SPEED."""
    speeds = tl.full((BLOCK_RANKS,), FULL, tl.int32)
    if speeds_ptr is not None:
        ranks = tl.arange(0, BLOCK_RANKS)
        given = tl.load(speeds_ptr + ranks, mask=ranks < num_ranks, other=1).to(tl.uint32)
        fastest = tl.maximum(tl.max(given, axis=0), 1)
        speeds = tl.maximum((given * FULL + fastest // 2) // fastest, 1).to(tl.int32)
    return speeds


@triton.jit
def capacities(time, speeds):
    """(R,) int32: assignments that ranks with ``speeds`` (R,) compute by ``time``."""
    return (time.to(tl.int64) * speeds // FULL).to(tl.int32)


@triton.jit
def time_of(load, speed):
    """int64: the least time by which a rank with ``speed`` computes ``load`` assignments."""
    load, speed = load.to(tl.uint32), speed.to(tl.uint32)
    rest = (load % speed * FULL + speed - 1) // speed
    return (load // speed).to(tl.int64) * FULL + rest


@triton.jit
def busiest(rank_load, speeds):
    """int64: the longest time of ``rank_load`` (R,)."""
    return tl.max(time_of(rank_load, speeds), axis=0)


@triton.jit
def least_time(
    rank_load,  # (R,) int32
    speeds,  # (R,) int32, 0 of ranks that are not meant
):
    """int64: the least time by which ranks together compute their loads."""
    together = tl.sum(speeds, axis=0)
    total = tl.maximum(tl.sum(tl.where(speeds > 0, rank_load, 0), axis=0), 0)  # -1 is impossible
    number = tl.sum((speeds > 0).to(tl.int32), axis=0)
    low = time_of(total, together)
    high = low + time_of(number, together)
    while low < high:  # every rank may lack a part of an assignment
        middle = (low + high) // 2
        enough = tl.sum(capacities(middle, speeds), axis=0) >= total
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high
