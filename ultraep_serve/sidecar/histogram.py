"""Imbalance counted into buckets for as long as the sidecar runs."""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.observability.schema import RecordArray
from ultraep_serve.observability.snapshot import imbalances

__all__ = ["BOUNDS", "ImbalanceHistogram"]

# Max/mean over ranks: fine near 1, where balancing aims, coarse where one rank does everything.
BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)


class ImbalanceHistogram:
    """Cumulative counts of the imbalance before and after balancing."""

    def __init__(self) -> None:
        self._counts = {stage: np.zeros(len(BOUNDS) + 1, np.int64) for stage in _FIELDS}
        self._sums = dict.fromkeys(_FIELDS, 0.0)
        self._last = (0, 0, 0)  # wall clock, batch and layer of the last record counted

    def observe(self, records: RecordArray, started_ns: int) -> None:
        """Count those of ``records`` that come after the last one counted.

        All ranks number batches alike, so a new lead repeats what the old one said. A writer that
        began (``started_ns``, wall clock) after the last record belongs to a new run.
        """
        time_ns, batch, layer = self._last
        if started_ns <= time_ns:
            later = (records["batch"] == batch) & (records["layer"] > layer)
            records = records[later | (records["batch"] > batch)]
        if not len(records):
            return
        last = records[-1]
        self._last = (int(last["time_ns"]), int(last["batch"]), int(last["layer"]))
        self._count(records)

    def _count(self, records: RecordArray) -> None:
        for stage, field in _FIELDS.items():
            values = imbalances(records[field])
            places = np.searchsorted(BOUNDS, values, side="left")
            self._counts[stage] += np.bincount(places, minlength=len(BOUNDS) + 1)
            self._sums[stage] += float(values.sum())

    def buckets(self, stage: str) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) pairs, as Prometheus wants them."""
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        totals: NDArray[np.int64] = np.cumsum(self._counts[stage])
        return [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]

    def sum(self, stage: str) -> float:
        """Sum of all values counted."""
        return self._sums[stage]


_FIELDS = {"before": "load_before", "after": "load_after"}
