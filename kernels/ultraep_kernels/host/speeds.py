"""speeds (R,) of ranks: whole numbers, FULL_SPEED the fastest's, the same on every rank.

Twin of what is measured: ``device._plan_times``. Nothing here is compiled: settings are read before
anything may be.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import EQUAL_PARTS, FULL_SPEED, LEAST_PARTS, SPEED_PARTS


def full_speeds(num_ranks: int) -> NDArray[np.int64]:
    """Speeds (R,) of ranks that are equally fast."""
    return np.full(num_ranks, FULL_SPEED, np.int64)


def whole_speeds(values: Sequence[float]) -> NDArray[np.int64]:
    """Speeds (R,) of ranks that compute ``values`` (R,), above 0, in the same time."""
    relative = np.asarray(values, np.float64) / max(values)
    return np.maximum(np.rint(relative * FULL_SPEED).astype(np.int64), 1)


def measured_speeds(picoseconds: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Speeds (R,) of ranks that take ``picoseconds`` (R,) for an assignment; 0: not known.

    All are equally fast until each rank knows its own.
    """
    if (picoseconds <= 0).any():
        return full_speeds(picoseconds.size)
    times = picoseconds.astype(np.int64)
    parts = np.maximum((2 * SPEED_PARTS * times.min() + times) // (2 * times), LEAST_PARTS)
    parts[parts >= EQUAL_PARTS] = SPEED_PARTS
    speeds: NDArray[np.int64] = parts * (FULL_SPEED // SPEED_PARTS)
    return speeds
