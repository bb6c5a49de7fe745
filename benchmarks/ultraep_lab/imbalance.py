"""What every figure here is about: how far the busiest rank is above the mean."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["imbalance"]


def imbalance(rank_load: NDArray[np.integer], speeds: NDArray[np.integer] | None = None) -> float:
    """Max/mean of assignments over ranks, ``rank_load`` (R,); 1.0 is perfect, also when empty.

    With ``speeds`` (R,) of time: the busiest rank's, over what it would be if all ended together.
    """
    total = int(rank_load.sum())
    if not total:
        return 1.0
    if speeds is None:
        return float(rank_load.max()) * rank_load.size / total
    return float((rank_load / speeds).max()) * int(speeds.sum()) / total
