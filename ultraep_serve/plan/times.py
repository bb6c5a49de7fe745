"""Times of ranks that are not equally fast: how long each computes, and the best there can be.

A speed is a whole number from 1 to FULL_SPEED, which the fastest rank has; a time is a number of
assignments at FULL_SPEED. With equal speeds times are numbers of assignments.
"""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED
from ultraep_kernels.host.plan import least_time as _least_time
from ultraep_kernels.host.speeds import full_speeds, whole_speeds

__all__ = ["full_speeds", "least_time", "rank_times", "whole_speeds"]

Integers = NDArray[np.integer]


def rank_times(rank_load: Integers, speeds: Integers) -> NDArray[np.int64]:
    """Times (R,), rounded up, of ``rank_load`` (R,) assignments at ``speeds`` (R,)."""
    times: NDArray[np.int64] = -(-rank_load.astype(np.int64) * FULL_SPEED // speeds)
    return times


def least_time(rank_load: Integers, speeds: Integers, *, domain_size: int | None = None) -> int:
    """The least time of the busiest rank, if any assignment could go to any rank of its domain.

    The largest over domains; ``rank_load`` (R,) assignments, ``speeds`` (R,).
    """
    loads, whole = rank_load.astype(np.int64), speeds.astype(np.int64)
    return int(_least_time(loads, whole, domain_size or loads.size))
