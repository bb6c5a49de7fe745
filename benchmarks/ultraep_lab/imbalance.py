"""What every figure here is about: how far the busiest rank is above the mean."""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.plan.context import PlanContext

__all__ = ["domains_of", "imbalance"]


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


def domains_of(context: PlanContext) -> list[slice]:
    """The ranks of each domain; the last may be smaller."""
    ranks, size = context.shape.num_ranks, context.domain_size
    return [slice(first, min(first + size, ranks)) for first in range(0, ranks, size)]
