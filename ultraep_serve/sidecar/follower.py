"""The rings, followed from poll to poll, and a bounded memory of their records."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ultraep_serve.errors import RingError
from ultraep_serve.sidecar.statistics.counters import Counters
from ultraep_serve.sidecar.statistics.snapshot import RankView
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.telemetry.reader import Poll, RingReader
from ultraep_serve.telemetry.record import RecordArray, aligned_dtype, record_dtype
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Decision, ExpertShape

__all__ = [
    "OWN_DTYPE",
    "PrimaryRanks",
    "RecordWindow",
    "RingFollower",
    "SkippedHistory",
    "merged",
    "most_records",
    "own_fields",
]


class RingFollower:
    """The ring of ``rank``: its header at the last poll and its newest records, without loads."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        max_records: int,
        timeline: Timeline,
        first_layer: Callable[[RingHeader], int],
    ) -> None:
        """Its times and bytes are added to ``timeline``; nothing is read before a poll.

        ``rank`` counts over pipeline stages. ``first_layer`` says how many layers the stages before
        a ring's have: records count layers within a stage, and whoever reads them over all stages.
        """
        self.header: RingHeader | None = None  # None: not readable, for the reason in ``error``
        self.error = "no ring yet"
        self.missed = 0  # records overwritten or damaged before they were read
        self._rank = rank
        self._path = RunFiles(run_dir).ring(rank)
        self._max_records = max_records
        self._timeline = timeline
        self._first_layer = first_layer
        self._reader: RingReader | None = None
        self._own = RecordWindow(OWN_DTYPE, 1)
        self._counted = (0, 0)  # start of the run, and its last record that the timeline has

    def poll(self, *, with_loads: bool) -> Poll | None:
        """Read what is new; None where the ring cannot be read.

        Loads are large: without ``with_loads`` the records are not kept.
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
        poll.records["layer"] += self._first_layer(poll.header)
        own = own_fields(poll.records)
        self._own.append(own)
        self._count_times(own, poll)
        self.header, self.error = poll.header, ""
        return poll if with_loads else replace(poll, records=poll.records[:0].copy())

    def held_at(self, poll: Poll) -> RecordArray:
        """All that the ring held at the last ``poll``, with the loads that polls did not keep."""
        assert self._reader is not None
        try:
            records = self._reader.recent()
        except RingError:
            return poll.records  # the next poll reports the error
        records = records[records["seq"] <= poll.header.written]
        records["layer"] += self._first_layer(poll.header)
        return records

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
            self._reader.close()  # an unlinked file keeps its memory while it is open
            self._reader = None
        self.header, self.error = None, str(error)

    def _count_times(self, own: RecordArray, poll: Poll) -> None:
        """By number, since the wall clock may be set; a ring put back holds known records again."""
        started_ns, last = self._counted
        if started_ns != poll.header.started_ns:
            last = 0
        self._timeline.add_own(self._rank, own[poll.records["seq"] > last])
        self._counted = (poll.header.started_ns, poll.header.written)


class PrimaryRanks:
    """The ranks whose loads and batch counters are shown, one of each pipeline stage.

    All ranks of a stage plan the same. It is the lowest that is alive, else the lowest readable
    one, chosen at every poll.
    """

    def __init__(
        self, counters: Counters, max_records: int, heartbeat_limit_seconds: float
    ) -> None:
        """Their records are also counted in ``counters``."""
        self.by_stage: dict[int, int] = {}  # in the order of stages
        self._counters = counters
        self._max_records = max_records
        self._limit = heartbeat_limit_seconds
        self._records = RecordWindow(OWN_DTYPE, max_records)
        self._skipped = SkippedHistory()

    @property
    def first(self) -> int:
        """That of the first stage which has one; -1 where none has."""
        return next(iter(self.by_stage.values()), -1)

    def follow(self, polls: Mapping[int, Poll], rings: Mapping[int, RingFollower]) -> None:
        """Add the new records of ``polls``, by rank, of the ``rings`` that could be read."""
        if not polls:
            return
        chosen = self._choose(polls)
        own = {rank: polls[rank] for rank in chosen.values()}
        header = next(iter(own.values())).header
        if chosen != self.by_stage or any(poll.replaced for poll in own.values()):
            self.by_stage, shape = chosen, header.shape
            self._records = RecordWindow(
                record_dtype(shape), most_records(shape, self._max_records)
            )
            self._skipped = SkippedHistory()
            new = merged([rings[rank].held_at(poll) for rank, poll in own.items()])
        else:
            new = merged([poll.records for poll in own.values()])
        self._records.append(new)
        self._skipped.observe(time.time_ns(), header)
        self._counters.observe(new, header.started_ns)

    def _choose(self, polls: Mapping[int, Poll]) -> dict[int, int]:
        now_ns = time.monotonic_ns()
        in_order = sorted(polls, key=lambda r: (not polls[r].header.alive(now_ns, self._limit), r))
        shape = polls[in_order[0]].header.shape
        chosen: dict[int, int] = {}
        for rank in in_order:
            if polls[rank].header.shape == shape:  # others are reported as a problem
                chosen.setdefault(polls[rank].header.pipeline_stage, rank)
        return dict(sorted(chosen.items()))

    def records(self) -> RecordArray:
        """The newest records, oldest first, with loads; not to be changed."""
        return self._records.records()

    def skipped_since(self, time_ns: int) -> Iterator[tuple[Decision, int]]:
        """As ``SkippedHistory.since``."""
        return self._skipped.since(time_ns)


def merged(records: Sequence[RecordArray]) -> RecordArray:
    """Those of several ranks, oldest first; not to be changed."""
    if len(records) == 1:
        return records[0]
    together = np.concatenate(records)
    return together[np.argsort(together["time_ns"], kind="stable")]


_MAX_BYTES = 64 << 20  # of records of all ranks; fewer are held where they are large

# What is kept of every rank's records; loads and slots are kept of the primary rank's only.
OWN_DTYPE = aligned_dtype(
    "batch", "time_ns", "bytes_sent", "bytes_received", "stage_ns", "layer", "decision", "policy"
)


def own_fields(records: RecordArray) -> RecordArray:
    """The fields of ``records`` (n,) that are in OWN_DTYPE."""
    result = np.empty(len(records), OWN_DTYPE)
    for name in OWN_DTYPE.names or ():
        result[name] = records[name]
    return result


def most_records(shape: ExpertShape, max_records: int) -> int:
    """Records to keep of each rank: up to ``max_records``, and at most 64 MiB of all ranks."""
    size = record_dtype(shape).itemsize + shape.num_ranks * OWN_DTYPE.itemsize
    return max(1, min(max_records, _MAX_BYTES // size))


class RecordWindow:
    """The newest ``max_records`` records, contiguous in memory."""

    def __init__(self, dtype: np.dtype[np.void], max_records: int) -> None:
        self._max_records = max_records
        self._buffer: RecordArray = np.empty(0, dtype)
        self._end = 0

    def append(self, records: RecordArray) -> None:
        """Add ``records``, which follow the ones held; the oldest are dropped."""
        records = records[-self._max_records :]
        if self._end + len(records) > len(self._buffer):
            self._make_room(len(records))
        self._buffer[self._end : self._end + len(records)] = records
        self._end += len(records)

    def _make_room(self, count: int) -> None:
        """Move the records to a larger buffer; arrays returned before keep the old one."""
        held = self.records()
        size = min(5 * self._max_records // 4 + count, max(64, 2 * (len(held) + count)))
        self._buffer = np.empty(size, held.dtype)
        self._buffer[: len(held)] = held
        self._end = len(held)

    def records(self) -> RecordArray:
        """All records held, oldest first; not to be changed."""
        return self._buffer[max(0, self._end - self._max_records) : self._end]


class SkippedHistory:
    """Numbers of batches skipped without a record, for the last ``max_changes`` changes.

    A record has a time, a skipped batch is only counted: the batches of a window are the counters
    now minus the counters before the window.
    """

    def __init__(self, max_changes: int = 4096) -> None:
        self._times = np.zeros(max_changes, np.uint64)
        self._counts = np.zeros((max_changes, len(Decision)), np.uint64)
        self._size = 0

    def observe(self, time_ns: int, header: RingHeader) -> None:
        """Store ``header``'s counters, read at ``time_ns`` (wall clock)."""
        if self._size == 0:
            self._append(header.started_ns, (0,) * len(Decision))
        if (self._counts[self._size - 1] != header.skipped_batches).any():
            self._append(time_ns, header.skipped_batches)

    def since(self, time_ns: int) -> Iterator[tuple[Decision, int]]:
        """Batches skipped at or after ``time_ns``, as exact as the polls.

        Those before the first poll are spread evenly over the time since the engine started.
        """
        if not self._size:
            return
        times, counts = self._times[: self._size], self._counts[: self._size]
        index = max(0, int(np.searchsorted(times, np.uint64(time_ns), side="right")) - 1)
        before: list[int] = counts[index].tolist()
        if index == 0 and self._size > 1 and not any(before):
            start, first = times[:2].tolist()
            part = min(1.0, max(0.0, (time_ns - start) / max(1, first - start)))
            before = [int(part * count) for count in counts[1].tolist()]
        for decision, now, then in zip(Decision, counts[-1].tolist(), before, strict=True):
            yield decision, now - then

    def _append(self, time_ns: int, counts: tuple[int, ...]) -> None:
        if self._size == len(self._times):  # drop the older half
            self._size -= self._size // 2
            for held in (self._times, self._counts):
                held[: self._size] = held[-self._size :]
        self._times[self._size], self._counts[self._size] = time_ns, counts
        self._size += 1
