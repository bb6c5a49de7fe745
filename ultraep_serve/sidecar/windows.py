"""Bounded memory of what was polled: records, and how batch counters moved over time."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from ultraep_serve.observability.schema import RecordArray, RingHeader
from ultraep_serve.types import Decision, Verb

__all__ = ["OWN_DTYPE", "RecordWindow", "SkippedHistory", "own_fields"]

# What is kept of every rank's records; loads and slots are kept of the lead's only.
OWN_DTYPE = np.dtype(
    [
        ("layer", "<i4"),
        ("decision", "u1"),
        ("policy", "u1"),
        ("batch", "<u8"),
        ("time_ns", "<u8"),
        ("bytes_sent", "<u8"),
        ("bytes_received", "<u8"),
        ("verb_ns", "<u8", (len(Verb),)),
    ]
)


def own_fields(records: RecordArray) -> RecordArray:
    """``records`` (n,) cut down to OWN_DTYPE."""
    result = np.empty(len(records), OWN_DTYPE)
    for name in OWN_DTYPE.names or ():
        result[name] = records[name]
    return result


class RecordWindow:
    """The newest records, at least ``max_records`` of them and at most one poll more."""

    def __init__(self, dtype: np.dtype[np.void], max_records: int) -> None:
        self._empty: RecordArray = np.empty(0, dtype)
        self._max_records = max_records
        self._chunks: deque[RecordArray] = deque()
        self._count = 0

    def append(self, records: RecordArray) -> None:
        """Add ``records``, which follow the ones held; the oldest give way."""
        if not len(records):
            return
        self._chunks.append(records)
        self._count += len(records)
        while self._count - len(self._chunks[0]) >= self._max_records:
            self._count -= len(self._chunks.popleft())

    def records(self) -> RecordArray:
        """All records held, oldest first; not to be changed."""
        if len(self._chunks) > 1:
            merged = np.concatenate(self._chunks)
            self._chunks = deque([merged[-self._max_records :]])
            self._count = len(self._chunks[0])
        return self._chunks[0] if self._chunks else self._empty

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()
        self._count = 0


class SkippedHistory:
    """How many batches were skipped without a record, as far back as ``max_changes`` changes.

    A record says when it was written, a skipped batch only counts: when a window begins, the
    counters that were seen before it are taken off.
    """

    def __init__(self, max_changes: int = 8192) -> None:
        self._seen: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=max_changes)

    def observe(self, time_ns: int, header: RingHeader) -> None:
        """Note ``header``'s counters, read at ``time_ns`` (wall clock)."""
        if not self._seen:
            self._seen.append((header.started_ns, (0,) * len(Decision)))
        if header.skipped_batches != self._seen[-1][1]:
            self._seen.append((time_ns, header.skipped_batches))

    def since(self, time_ns: int) -> Iterator[tuple[Decision, int]]:
        """Batches skipped at or after ``time_ns``, as exactly as was polled."""
        if not self._seen:
            return
        before = self._seen[0][1]
        for moment, counts in self._seen:
            if moment > time_ns:
                break
            before = counts
        for decision, now, then in zip(Decision, self._seen[-1][1], before, strict=True):
            yield decision, now - then

    def clear(self) -> None:
        """Forget everything: another writer counts from zero."""
        self._seen.clear()
