"""Counters and histograms since the sidecar started, from the primary rank's records."""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.sidecar.statistics.figures import (
    avoided_seconds,
    imbalances,
    savings,
    time_imbalances,
)
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.sidecar.statistics.window import Window
from ultraep_serve.telemetry.record import RecordArray

__all__ = ["BOUNDS", "Counters", "ImbalanceHistogram"]


class Counters:
    """Imbalances and estimated seconds; a record counts once, whichever rank is the primary one."""

    def __init__(self, timeline: Timeline) -> None:
        """What is counted here is also added to ``timeline``."""
        self._timeline = timeline
        self.before = ImbalanceHistogram()
        self.after = ImbalanceHistogram()
        self.time_before = ImbalanceHistogram()
        self.time_after = ImbalanceHistogram()
        self.saved_seconds = 0.0
        self.worsened_seconds = 0.0  # of layers whose busiest rank got more
        self._last = (0, 0, 0)  # wall clock, batch and layer of the last record counted

    def observe(self, records: RecordArray, started_ns: int) -> None:
        """Count those of the primary rank's ``records`` that come after the last one counted.

        All ranks number batches alike, so a new primary rank repeats records of the old one. A
        writer that started (``started_ns``, wall clock) after the last record is of a new run.
        """
        time_ns, batch, layer = self._last
        if started_ns <= time_ns:
            later = (records["batch"] == batch) & (records["layer"] > layer)
            records = records[later | (records["batch"] > batch)]
        if not len(records):
            return
        last = records[-1]
        self._last = (int(last["time_ns"]), int(last["batch"]), int(last["layer"]))
        self._timeline.add_batches(records)
        considered = Window().considered(records)
        if len(considered):
            self._count(considered)

    def _count(self, records: RecordArray) -> None:
        self.before.count(imbalances(records["load_before"]))
        self.after.count(imbalances(records["load_after"]))
        self.time_before.count(time_imbalances(records["load_before"], records["speed"]))
        self.time_after.count(time_imbalances(records["load_after"], records["speed"]))
        self._timeline.add(records)
        estimate = savings(avoided_seconds(records), spent=0.0)
        self.saved_seconds += estimate.saved_seconds
        self.worsened_seconds += estimate.spent_seconds


# Max/mean over ranks: fine near 1, the goal of balancing, coarse where one rank does everything.
BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)


class ImbalanceHistogram:
    """Counts of imbalances by bucket."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(len(BOUNDS) + 1, np.int64)
        self.sum = 0.0  # of all values counted

    def count(self, values: NDArray[np.float64]) -> None:
        """Count ``values`` (n,)."""
        buckets = np.searchsorted(BOUNDS, values, side="left")
        self._counts += np.bincount(buckets, minlength=len(BOUNDS) + 1)
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) pairs, the format of Prometheus."""
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        totals: NDArray[np.int64] = np.cumsum(self._counts)
        return [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
