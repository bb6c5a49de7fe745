"""One rank's ring, followed from poll to poll, and a bounded memory of what was polled."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep_serve.errors import RingError
from ultraep_serve.ring.reader import Poll, RingReader
from ultraep_serve.ring.schema import RecordArray, RingHeader, record_dtype, ring_path
from ultraep_serve.sidecar.statistics.snapshot import RankView
from ultraep_serve.sidecar.timeline import Timeline
from ultraep_serve.types import Decision, ExpertShape, Stage

__all__ = [
    "OWN_DTYPE",
    "RecordWindow",
    "RingFollower",
    "SkippedHistory",
    "most_records",
    "own_fields",
]


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


_MAX_BYTES = 64 << 20  # of records of all ranks; fewer are held where they are large

# What is kept of every rank's records; loads and slots are kept of the primary's only.
OWN_DTYPE = np.dtype(
    [
        ("batch", "<u8"),
        ("time_ns", "<u8"),
        ("bytes_sent", "<u8"),
        ("bytes_received", "<u8"),
        ("stage_ns", "<u8", (len(Stage),)),
        ("layer", "<i4"),
        ("decision", "u1"),
        ("policy", "u1"),
    ],
    align=True,  # sums take a third of the time
)


def own_fields(records: RecordArray) -> RecordArray:
    """``records`` (n,) cut down to OWN_DTYPE."""
    result = np.empty(len(records), OWN_DTYPE)
    for name in OWN_DTYPE.names or ():
        result[name] = records[name]
    return result


def most_records(shape: ExpertShape, max_records: int) -> int:
    """How many to keep of each rank, up to ``max_records``: all of them together stay in bounds."""
    size = record_dtype(shape).itemsize + shape.num_ranks * OWN_DTYPE.itemsize
    return max(1, min(max_records, _MAX_BYTES // size))


class RecordWindow:
    """The newest ``max_records`` records, in one piece of memory."""

    def __init__(self, dtype: np.dtype[np.void], max_records: int) -> None:
        self._max_records = max_records
        self._buffer: RecordArray = np.empty(0, dtype)
        self._end = 0

    def append(self, records: RecordArray) -> None:
        """Add ``records``, which follow the ones held; the oldest give way."""
        records = records[-self._max_records :]
        if self._end + len(records) > len(self._buffer):
            self._make_room(len(records))
        self._buffer[self._end : self._end + len(records)] = records
        self._end += len(records)

    def _make_room(self, count: int) -> None:
        """Move what is held to a larger buffer; arrays handed out keep the old one."""
        held = self.records()
        size = min(5 * self._max_records // 4 + count, max(64, 2 * (len(held) + count)))
        self._buffer = np.empty(size, held.dtype)
        self._buffer[: len(held)] = held
        self._end = len(held)

    def records(self) -> RecordArray:
        """All records held, oldest first; not to be changed."""
        return self._buffer[max(0, self._end - self._max_records) : self._end]

    def clear(self) -> None:
        """Forget everything."""
        self._buffer = self._buffer[:0].copy()
        self._end = 0


class SkippedHistory:
    """How many batches were skipped without a record, as far back as ``max_changes`` changes.

    A record says when it was written, a skipped batch only counts: when a window begins, the
    counters that were seen before it are taken off.
    """

    def __init__(self, max_changes: int = 4096) -> None:
        self._times = np.zeros(max_changes, np.uint64)
        self._counts = np.zeros((max_changes, len(Decision)), np.uint64)
        self._size = 0

    def observe(self, time_ns: int, header: RingHeader) -> None:
        """Note ``header``'s counters, read at ``time_ns`` (wall clock)."""
        if self._size == 0:
            self._append(header.started_ns, (0,) * len(Decision))
        if (self._counts[self._size - 1] != header.skipped_batches).any():
            self._append(time_ns, header.skipped_batches)

    def since(self, time_ns: int) -> Iterator[tuple[Decision, int]]:
        """Batches skipped at or after ``time_ns``, as exactly as was polled.

        Those before the first poll are taken to have come evenly since the engine started.
        """
        if not self._size:
            return
        times, counts = self._times[: self._size], self._counts[: self._size]
        place = max(0, int(np.searchsorted(times, np.uint64(time_ns), side="right")) - 1)
        before: list[int] = counts[place].tolist()
        if place == 0 and self._size > 1 and not any(before):
            start, first = times[:2].tolist()
            part = min(1.0, max(0.0, (time_ns - start) / max(1, first - start)))
            before = [int(part * count) for count in counts[1].tolist()]
        for decision, now, then in zip(Decision, counts[-1].tolist(), before, strict=True):
            yield decision, now - then

    def clear(self) -> None:
        """Forget everything: another writer counts from zero."""
        self._size = 0

    def _append(self, time_ns: int, counts: tuple[int, ...]) -> None:
        if self._size == len(self._times):  # the older half gives way
            self._size -= self._size // 2
            for held in (self._times, self._counts):
                held[: self._size] = held[-self._size :]
        self._times[self._size], self._counts[self._size] = time_ns, counts
        self._size += 1
