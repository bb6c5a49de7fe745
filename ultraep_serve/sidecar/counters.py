"""Counters and histograms over the sidecar's life, from the primary rank's records.

The primary rank is the one whose loads and batch counters are shown: all ranks plan the same.
"""

import time
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.ring.reader import Poll
from ultraep_serve.ring.schema import RecordArray, record_dtype
from ultraep_serve.sidecar.follower import (
    OWN_DTYPE,
    RecordWindow,
    RingFollower,
    SkippedHistory,
    most_records,
)
from ultraep_serve.sidecar.statistics.snapshot import avoided_seconds, imbalances, savings
from ultraep_serve.sidecar.statistics.window import Window
from ultraep_serve.sidecar.timeline import Timeline
from ultraep_serve.types import Decision

__all__ = ["BOUNDS", "Counters", "ImbalanceHistogram", "PrimaryRank"]


class Counters:
    """Imbalances and estimated seconds; every record counts once, whichever rank is primary."""

    def __init__(self, timeline: Timeline) -> None:
        """What is counted here is passed on to ``timeline``."""
        self._timeline = timeline
        self.before = ImbalanceHistogram()
        self.after = ImbalanceHistogram()
        self.saved_seconds = 0.0
        self.worsened_seconds = 0.0  # of layers whose busiest rank was given more
        self._last = (0, 0, 0)  # wall clock, batch and layer of the last record counted

    def observe(self, records: RecordArray, started_ns: int) -> None:
        """Count those of the primary's ``records`` that come after the last one counted.

        All ranks number batches alike, so a new primary rank repeats what the old one said. A
        writer that began (``started_ns``, wall clock) after the last record belongs to a new run.
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
        weighed = Window().weighed(records)
        if len(weighed):
            self._count(weighed)

    def _count(self, records: RecordArray) -> None:
        self.before.count(imbalances(records["load_before"]))
        self.after.count(imbalances(records["load_after"]))
        self._timeline.add(records)
        estimate = savings(avoided_seconds(records), spent=0.0)
        self.saved_seconds += estimate.saved_seconds
        self.worsened_seconds += estimate.spent_seconds


class PrimaryRank:
    """The lowest living rank, else the lowest readable one; chosen anew at every poll."""

    def __init__(
        self, counters: Counters, max_records: int, heartbeat_limit_seconds: float
    ) -> None:
        """Its records are also counted in ``counters``."""
        self.rank = -1  # none yet
        self._tally = counters
        self._max_records = max_records
        self._limit = heartbeat_limit_seconds
        self._records = RecordWindow(OWN_DTYPE, max_records)
        self._skipped = SkippedHistory()

    def follow(self, polls: Mapping[int, Poll], rings: Mapping[int, RingFollower]) -> None:
        """Take what is new from ``polls``, by rank, of the ``rings`` that could be read."""
        if not polls:
            return
        now_ns = time.monotonic_ns()
        rank = min(polls, key=lambda r: (not polls[r].header.alive(now_ns, self._limit), r))
        poll = polls[rank]
        new = poll.records
        if rank != self.rank or poll.replaced:
            self.rank = rank
            shape = poll.header.shape
            self._records = RecordWindow(
                record_dtype(shape), most_records(shape, self._max_records)
            )
            self._skipped.clear()
            new = rings[rank].held_at(poll)
        self._records.append(new)
        self._skipped.observe(time.time_ns(), poll.header)
        self._tally.observe(new, poll.header.started_ns)

    def records(self) -> RecordArray:
        """The newest records, oldest first, with loads; not to be changed."""
        return self._records.records()

    def skipped_since(self, time_ns: int) -> Iterator[tuple[Decision, int]]:
        """As ``SkippedHistory.since``."""
        return self._skipped.since(time_ns)


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
