"""Bounded memory of what was polled: records, and how batch counters moved over time."""

from collections.abc import Iterator

import numpy as np

from ultraep_serve.observability.schema import RecordArray, RingHeader, record_dtype
from ultraep_serve.types import Decision, ExpertShape, Verb

__all__ = ["OWN_DTYPE", "RecordWindow", "SkippedHistory", "most_records", "own_fields"]

_MAX_BYTES = 64 << 20  # of records of all ranks; fewer are held where they are large

# What is kept of every rank's records; loads and slots are kept of the lead's only.
OWN_DTYPE = np.dtype(
    [
        ("batch", "<u8"),
        ("time_ns", "<u8"),
        ("bytes_sent", "<u8"),
        ("bytes_received", "<u8"),
        ("verb_ns", "<u8", (len(Verb),)),
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
