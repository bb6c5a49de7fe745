"""The reading end: new records of one ring, from a file that is not trusted."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultraep_serve.errors import RingError
from ultraep_serve.system.files import SharedFile
from ultraep_serve.telemetry.record import RecordArray, record_checksum, record_dtype
from ultraep_serve.telemetry.ring import HEADER_BYTES, RingHeader, parse_header
from ultraep_serve.types import Decision, Policy

_MAX_POLL_BYTES = 64 << 20  # of one poll; older records beyond it count as missed


@dataclass(frozen=True)
class Poll:
    header: RingHeader
    records: RecordArray  # (n,) new and intact, oldest first
    missed: int  # records overwritten, or found damaged, before they could be read
    replaced: bool  # by the file of a new writer


class RingReader:
    """Follows the ring at ``path``. Every method raises RingError and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: SharedFile | None = None
        self._read_up_to = 0  # sequence number of the last record returned or counted as missed
        self._open()

    def _open(self) -> None:
        try:
            self._file = SharedFile.open(self._path)
        except FileNotFoundError:
            raise self._damaged("deleted") from None
        except OSError as error:
            raise RingError(f"cannot open {self._path.name}: {error.strerror or error}") from error
        try:
            header = self.header()
        except RingError:
            self.close()
            raise
        self._read_up_to = 0
        self._dtype = record_dtype(header.shape)
        self._sizes = (header.shape, header.capacity)
        self._file.size = HEADER_BYTES + header.capacity * header.record_bytes

    def header(self) -> RingHeader:
        header = parse_header(self._read(HEADER_BYTES, 0), self._path.name)
        if self._path.name != f"ring-{header.number}":
            raise RingError(f"{self._path.name} is damaged: number = {header.number}")
        return header

    def poll(self) -> Poll:
        """Records written since the last poll; at first all that the ring still holds."""
        replaced = self._reopen_if_replaced()
        header = self.header()
        if (header.shape, header.capacity) != self._sizes or header.written < self._read_up_to:
            raise RingError(f"{self._path.name} was changed by another writer; restart the engine")
        most = min(header.capacity, max(1, _MAX_POLL_BYTES // header.record_bytes))
        first = max(self._read_up_to, header.written - most)
        records, damaged = self._intact(first + 1, header.written)
        missed = first - self._read_up_to + damaged
        self._read_up_to = header.written
        return Poll(header, records, missed, replaced)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen_if_replaced(self) -> bool:
        """Follow the name to another file, if it leads there, which has another writer."""
        if self._file is not None:
            try:
                damage = self._file.damage()
            except OSError as error:
                raise RingError(f"cannot look at {self._path.name}: {error.strerror}") from error
            if not damage:
                return False
            if damage != "replaced":
                raise self._damaged(damage)
            self.close()
        self._open()
        return True

    def _damaged(self, damage: str) -> RingError:
        return RingError(
            f"{self._path.name} was {damage}: its server has ended, or serves on unseen until it "
            "is restarted"
        )

    def _read(self, size: int, offset: int) -> bytes:
        if self._file is None:
            raise RingError(f"{self._path.name} is closed")
        try:
            data = self._file.read(size, offset)
        except OSError as error:
            raise RingError(f"cannot read {self._path.name}: {error.strerror}") from error
        if len(data) < size:
            raise self._damaged("truncated")
        return data

    def _intact(self, first: int, last: int) -> tuple[RecordArray, int]:
        """Intact records ``first`` to ``last`` (sequence numbers), and how many were not."""
        if last < first:
            return np.empty(0, self._dtype), 0
        records = self._fetch(first, last)
        sequence = np.uint64(first) + np.arange(last - first + 1, dtype=np.uint64)
        good = self._check(records, sequence)
        for index in np.flatnonzero(~good):
            # Another processor may see the counter before the record: read once more.
            again = self._fetch(first + int(index), first + int(index))
            if self._check(again, sequence[index : index + 1])[0]:
                records[index] = again[0]
                good[index] = True
        if good.all():
            return records, 0
        return records[good], int((~good).sum())

    def _fetch(self, first: int, last: int) -> RecordArray:
        capacity, size = self._sizes[1], self._dtype.itemsize
        start, count = (first - 1) % capacity, last - first + 1
        head = min(count, capacity - start)
        data = bytearray(self._read(head * size, HEADER_BYTES + start * size))
        if count > head:
            data += self._read((count - head) * size, HEADER_BYTES)
        return np.frombuffer(data, self._dtype)

    def _check(self, records: RecordArray, sequence: np.ndarray) -> np.ndarray:
        good: np.ndarray = (
            (records["seq"] == sequence)
            & (records["decision"] < len(Decision))
            & (records["policy"] < len(Policy))
        )
        view, size = records.view(np.uint8).data, self._dtype.itemsize
        found = [
            record_checksum(number, view[start : start + size])
            for number, start in zip(sequence.tolist(), range(0, len(view), size), strict=True)
        ]
        good &= records["crc"] == np.array(found, np.uint64)
        return good
