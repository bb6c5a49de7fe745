"""Histograms of imbalances: one that only grows, as Prometheus wants it, and fine bounds."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["BOUNDS", "FINE_BOUNDS", "ImbalanceHistogram", "percentile"]

# Max/mean over ranks: fine near 1, where balancing aims, coarse where one rank does everything.
BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)

# What exceeds 1, in steps of a tenth: a percentile is off by at most that.
FINE_BOUNDS: NDArray[np.float64] = 1 + np.concatenate([[0.0], 1e-3 * 1.1 ** np.arange(127)])


def percentile(counts: NDArray[np.integer], part: float) -> float:
    """The value below which ``part`` of ``counts`` (len(FINE_BOUNDS) + 1,) lies, interpolated."""
    reached: NDArray[np.int64] = np.cumsum(counts)
    place = int(np.searchsorted(reached, part * reached[-1]))
    if place == 0 or place == len(FINE_BOUNDS):
        return float(FINE_BOUNDS[max(0, place - 1)])
    inside = (part * reached[-1] - reached[place - 1]) / counts[place]
    low, high = FINE_BOUNDS[place - 1 : place + 1]
    return float(low + inside * (high - low))


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
