"""One rank's ring, followed from poll to poll: also one that comes late, goes or is replaced."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep_serve.observability import Poll, RankView, RingError, RingHeader, RingReader, ring_path
from ultraep_serve.observability.schema import RecordArray
from ultraep_serve.sidecar.timeline import Timeline
from ultraep_serve.sidecar.windows import OWN_DTYPE, RecordWindow, most_records, own_fields

__all__ = ["RingFollower"]


class RingFollower:
    """What ``rank`` wrote: its header as last polled and its newest records, without loads."""

    def __init__(self, run_dir: Path, rank: int, max_records: int, timeline: Timeline) -> None:
        """Its times and bytes are passed on to ``timeline``; nothing is read before a poll."""
        self.header: RingHeader | None = None  # None: not readable, ``error`` says why
        self.error = "no ring yet"
        self.missed = 0  # records overwritten or damaged before they were read
        self._rank = rank
        self._path = ring_path(run_dir, rank)
        self._max_records = max_records
        self._timeline = timeline
        self._reader: RingReader | None = None
        self._own = RecordWindow(OWN_DTYPE, 1)
        self._counted_ns = 0  # wall clock of the last record that the timeline has

    def poll(self, *, with_loads: bool) -> Poll | None:
        """Read what is new; None where the ring cannot be read.

        Loads are large: without ``with_loads`` the records are let go at once.
        """
        fresh = self._reader is None
        try:
            if self._reader is None:
                self._reader = RingReader(self._path)
            poll = self._reader.poll()
        except RingError as error:
            self._lose(error)
            return None
        poll = replace(poll, replaced=poll.replaced or fresh)
        if poll.replaced:
            self._own = RecordWindow(OWN_DTYPE, most_records(poll.header.shape, self._max_records))
        else:
            self.missed += poll.missed
        own = own_fields(poll.records)
        self._own.append(own)
        self._count_times(own)
        self.header, self.error = poll.header, ""
        return poll if with_loads else replace(poll, records=poll.records[:0].copy())

    def held_at(self, poll: Poll) -> RecordArray:
        """What the ring held at ``poll``, just made, with the loads that earlier polls let go."""
        assert self._reader is not None
        try:
            records = self._reader.recent()
        except RingError:
            return poll.records  # the next poll reports what is wrong with the file
        return records[records["seq"] <= poll.header.written]

    def records(self) -> RecordArray:
        """The newest records, oldest first, as OWN_DTYPE; not to be changed."""
        return self._own.records()

    def view(self, now_ns: int, heartbeat_limit_seconds: float) -> RankView:
        """The rank at ``now_ns`` (CLOCK_MONOTONIC)."""
        header = self.header
        if header is None:
            return RankView(self._rank, None, False, None, self.records())
        return RankView(
            self._rank,
            header,
            header.alive(now_ns, heartbeat_limit_seconds),
            header.heartbeat_age_seconds(now_ns),
            self.records(),
            header.last_batch_age_seconds(now_ns),
        )

    def _lose(self, error: RingError) -> None:
        if self._reader is not None:
            self._reader.close()  # an unlinked file keeps its memory while it is held open
            self._reader = None
        self.header, self.error = None, str(error)

    def _count_times(self, records: RecordArray) -> None:
        new = records[records["time_ns"] > np.uint64(self._counted_ns)]
        if len(new):
            self._counted_ns = int(new["time_ns"][-1])
            self._timeline.add_own(self._rank, new)
