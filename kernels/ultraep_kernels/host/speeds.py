"""speeds: what ranks published, and speeds (R,) in use -> speeds (R,) to use from now on.

Whole numbers, the same on every rank. Speeds follow only what differs clearly from those in use,
and not further than a step at a time, so that neither noise nor what follows from it moves them.
Twin: ``device.speeds``. Nothing here is compiled: settings are read before anything may be.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import FULL_SPEED, SPEED_LIMITS

__all__ = ["follow", "full_speeds", "whole_speeds"]


def full_speeds(num_ranks: int) -> NDArray[np.int64]:
    """Speeds (R,) of ranks that are equally fast."""
    return np.full(num_ranks, FULL_SPEED, np.int64)


def whole_speeds(values: Sequence[float]) -> NDArray[np.int64]:
    """Speeds (R,) of ranks that compute ``values`` (R,), above 0, in the same time."""
    relative = np.asarray(values, np.float64) / max(values)
    return np.maximum(np.rint(relative * FULL_SPEED).astype(np.int64), 1)


def follow(picoseconds: NDArray[np.integer[Any]], speeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Speeds (R,) after one more batch; ``speeds`` where a rank does not know its own yet.

    Args:
        picoseconds: (R,) per assignment, as each rank measured; 0 where it does not know.
        speeds: (R,), each 1 to FULL_SPEED, which one of them has.
    """
    if (picoseconds <= 0).any():
        return speeds
    limits = SPEED_LIMITS
    found = int(picoseconds.min()) * FULL_SPEED // picoseconds.astype(np.int64)
    stepped = np.clip(found, speeds - limits.step, speeds + limits.step)
    rounded = (stepped + limits.grain // 2) // limits.grain * limits.grain
    changed = np.maximum(rounded, limits.least)
    clear = np.where(speeds == FULL_SPEED, limits.leave_full, speeds // limits.band)
    kept = np.where(abs(found - speeds) > clear, changed, speeds)
    near_full = np.minimum(found, stepped) >= FULL_SPEED - limits.near_full
    values = np.where(near_full, FULL_SPEED, kept)
    scaled: NDArray[np.int64] = values * FULL_SPEED // values.max()
    return scaled
