"""A histogram that only grows, as Prometheus wants it."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["BOUNDS", "ImbalanceHistogram"]

# Max/mean over ranks: fine near 1, where balancing aims, coarse where one rank does everything.
BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)


class ImbalanceHistogram:
    """Counts of imbalances by bucket."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(len(BOUNDS) + 1, np.int64)
        self.sum = 0.0  # of all values counted

    def count(self, values: NDArray[np.float64]) -> None:
        """Count ``values`` (n,)."""
        places = np.searchsorted(BOUNDS, values, side="left")
        self._counts += np.bincount(places, minlength=len(BOUNDS) + 1)
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) pairs, as Prometheus wants them."""
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        totals: NDArray[np.int64] = np.cumsum(self._counts)
        return [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
