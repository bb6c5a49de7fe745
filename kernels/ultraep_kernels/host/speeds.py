"""speeds: what ranks published, and speeds (R,) in use -> speeds (R,) to use from now on.

Whole numbers, the same on every rank. Speeds follow only what differs clearly from those in use,
and not further than a step at a time, so that neither noise nor what follows from it moves them.
Twin: ``device.speeds``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import FULL_SPEED, SPEED_LIMITS

__all__ = ["follow"]


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
    kept = np.where(abs(found - speeds) > limits.band, changed, speeds)
    near_full = np.minimum(found, stepped) >= FULL_SPEED - limits.near_full
    values = np.where(near_full, FULL_SPEED, kept)
    scaled: NDArray[np.int64] = values * FULL_SPEED // values.max()
    return scaled
