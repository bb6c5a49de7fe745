"""What is held of records and of batches without any, in bounded memory."""

import numpy as np

from ultraep_serve.telemetry.record import RecordArray, aligned_dtype, record_dtype
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision, ExpertShape

__all__ = ["OWN_DTYPE", "RecordWindow", "SkippedHistory", "most_records", "skipped_since"]

_MAX_BYTES = 64 << 20  # of records of all ranks; fewer are held where they are large
# What is kept of every rank's records; loads and slots are kept of the primary rank's only.
OWN_DTYPE = aligned_dtype(
    "seq", "batch", "time_ns", "bytes_sent", "bytes_received", "stage_ns", "layer", "decision",
    "policy",
)  # fmt: skip
_SKIPPED_DTYPE = np.dtype([("time_ns", "<u8"), ("counts", "<u8", (len(Decision),))])


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


class SkippedHistory(RecordWindow):
    """Numbers of batches skipped without a record, after each of the last changes.

    A record has a time, a skipped batch is only counted: see ``skipped_since``.
    """

    def __init__(self, max_changes: int = 4096) -> None:
        super().__init__(_SKIPPED_DTYPE, max_changes)

    def observe(self, time_ns: int, header: RingHeader) -> None:
        """Store ``header``'s counters, read at ``time_ns`` (wall clock)."""
        counts = header.skipped_batches
        if not len(self.records()):
            self._append(min(time_ns, header.started_ns), (0,) * len(counts))
        if (self.records()["counts"][-1] != counts).any():
            self._append(time_ns, counts)

    def _append(self, time_ns: int, counts: tuple[int, ...]) -> None:
        self.append(np.array([(time_ns, counts)], _SKIPPED_DTYPE))


def skipped_since(history: RecordArray, time_ns: int) -> dict[Decision, int]:
    """Batches skipped at or after ``time_ns``, as exact as the polls, by ``SkippedHistory``.

    They are the counters at the end minus those before. Those before the first poll are spread
    evenly over the time since the engine started.
    """
    if not len(history):
        return dict.fromkeys(Decision, 0)
    times, counts = history["time_ns"], history["counts"]
    index = max(0, int(np.searchsorted(times, np.uint64(time_ns), side="right")) - 1)
    before: list[int] = counts[index].tolist()
    if index == 0 and len(history) > 1 and not any(before):
        start, first = times[:2].tolist()
        part = min(1.0, max(0.0, (time_ns - start) / max(1, first - start)))
        before = [int(part * count) for count in counts[1].tolist()]
    pairs = zip(Decision, counts[-1].tolist(), before, strict=True)
    return {decision: now - then for decision, now, then in pairs}
