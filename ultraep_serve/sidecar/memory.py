"""What is held of records and of batches without any, in bounded memory."""

from collections.abc import Iterator

import numpy as np

from ultraep_serve.telemetry.record import RecordArray, aligned_dtype, record_dtype
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Decision, ExpertShape

__all__ = ["OWN_DTYPE", "RecordWindow", "SkippedHistory", "most_records"]

_MAX_BYTES = 64 << 20  # of records of all ranks; fewer are held where they are large
# What is kept of every rank's records; loads and slots are kept of the primary rank's only.
OWN_DTYPE = aligned_dtype(
    "seq", "batch", "time_ns", "bytes_sent", "bytes_received", "stage_ns", "layer", "decision",
    "policy",
)  # fmt: skip


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

    def shift(self, by_ns: int) -> None:
        """The wall clock was set; arrays returned before stay as they are."""
        self._buffer = self._buffer.copy()
        self._buffer["time_ns"] += np.int64(by_ns).astype(np.uint64)  # modulo 2**64


class SkippedHistory:
    """Numbers of batches skipped without a record, for the last ``max_changes`` changes.

    A record has a time, a skipped batch is only counted: the batches of a window are the counters
    now minus the counters before the window.
    """

    def __init__(self, max_changes: int = 4096) -> None:
        self._times = np.zeros(max_changes, np.int64)
        self._counts = np.zeros((max_changes, len(Decision)), np.uint64)
        self._size = 0

    def observe(self, time_ns: int, header: RingHeader) -> None:
        """Store ``header``'s counters, read at ``time_ns`` (wall clock)."""
        if self._size == 0:
            self._append(min(time_ns, header.started_ns), (0,) * len(Decision))
        if (self._counts[self._size - 1] != header.skipped_batches).any():
            self._append(time_ns, header.skipped_batches)

    def since(self, time_ns: int) -> Iterator[tuple[Decision, int]]:
        """Batches skipped at or after ``time_ns``, as exact as the polls.

        Those before the first poll are spread evenly over the time since the engine started.
        """
        if not self._size:
            return
        times, counts = self._times[: self._size], self._counts[: self._size]
        index = max(0, int(np.searchsorted(times, time_ns, side="right")) - 1)
        before: list[int] = counts[index].tolist()
        if index == 0 and self._size > 1 and not any(before):
            start, first = times[:2].tolist()
            part = min(1.0, max(0.0, (time_ns - start) / max(1, first - start)))
            before = [int(part * count) for count in counts[1].tolist()]
        for decision, now, then in zip(Decision, counts[-1].tolist(), before, strict=True):
            yield decision, now - then

    def shift(self, by_ns: int) -> None:
        """The wall clock was set."""
        self._times[: self._size] += by_ns

    def _append(self, time_ns: int, counts: tuple[int, ...]) -> None:
        if self._size == len(self._times):  # drop the older half
            self._size -= self._size // 2
            for held in (self._times, self._counts):
                held[: self._size] = held[-self._size :]
        self._times[self._size], self._counts[self._size] = time_ns, counts
        self._size += 1
