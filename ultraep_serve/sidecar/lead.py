"""The lead: the one rank whose loads and batch counters are shown, for all ranks plan the same."""

import time
from collections.abc import Iterator, Mapping

from ultraep_serve.observability import Poll
from ultraep_serve.observability.schema import RecordArray, record_dtype
from ultraep_serve.sidecar.ring_follower import RingFollower
from ultraep_serve.sidecar.tally import Tally
from ultraep_serve.sidecar.windows import OWN_DTYPE, RecordWindow, SkippedHistory, most_records
from ultraep_serve.types import Decision

__all__ = ["Lead"]


class Lead:
    """The lowest living rank, else the lowest readable one; chosen anew at every poll."""

    def __init__(self, tally: Tally, max_records: int, heartbeat_limit_seconds: float) -> None:
        """Its records are also counted in ``tally``."""
        self.rank = -1  # none yet
        self._tally = tally
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
