"""Speeds and times of ranks for the planner's kernels, in the host's integers.

Twins: ``least_time``, ``_capacities`` and ``busiest_time`` in ``host._plan_search``,
``host.speeds``. Divisions in the search are of 32 bits, which take a fifth of the instructions of
those of 64.
"""

import triton
import triton.language as tl

from ultraep_kernels.contract import EQUAL_PARTS, FULL_SPEED, LEAST_PARTS, SPEED_PARTS, TIME

LONGEST = tl.constexpr(1 << 28)  # times that an attempt computes with, and together all loads
FULL = tl.constexpr(FULL_SPEED)
_PARTS, _LEAST = tl.constexpr(SPEED_PARTS), tl.constexpr(LEAST_PARTS)
_EQUAL, _TIME = tl.constexpr(EQUAL_PARTS), tl.constexpr(TIME)
_NEVER = tl.constexpr((1 << 31) - 1)  # longer than any rank takes


@triton.jit
def speeds_of(
    given,  # Given: a row (R,) of speeds, or those that ranks measure; None: all are equal
    MEASURES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """(BLOCK_RANKS,) int32: speeds of all ranks, the fastest at FULL_SPEED."""
    ranks = tl.arange(0, BLOCK_RANKS)
    speeds = tl.full((BLOCK_RANKS,), FULL, tl.int32)
    if given.speeds is not None:
        configured = tl.load(given.speeds + ranks, mask=ranks < NUM_RANKS, other=1).to(tl.uint32)
        fastest = tl.maximum(tl.max(configured, axis=0), 1)
        speeds = tl.maximum((configured * FULL + fastest // 2) // fastest, 1).to(tl.int32)
    elif MEASURES:
        row_ptr = given.rows.table + ranks * given.rows.stride
        took = tl.load(row_ptr + _TIME, mask=ranks < NUM_RANKS, other=_NEVER).to(tl.int64)
        fastest = tl.min(took, axis=0)
        took = tl.maximum(took, 1)
        parts = tl.maximum((2 * _PARTS * fastest + took) // (2 * took), _LEAST)
        parts = tl.where((parts >= _EQUAL) | (fastest <= 0), _PARTS, parts)
        speeds = (parts * (FULL // _PARTS)).to(tl.int32)
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
