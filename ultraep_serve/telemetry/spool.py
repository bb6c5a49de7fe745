"""What one rank's router chose, appended to a file of the run directory during a recording.

Layout: one header page, then chunks, one per MoE layer of a batch: a chunk header and an array of
the rank's own tokens. Level tokens: (tokens, K) expert ids of 16 bits (32 where there are more
experts), -1 padding, E an invalid id. Level loads: (1, E) uint32 assignments per expert.

The file is in shared memory and never exceeds its maximum size; what does not fit is lost and
counted. Nothing here waits.
"""

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import SpoolError
from ultraep_serve.telemetry.control import Recording, RecordLevel
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import MAX_EXPERTS, MAX_RANKS
from ultraep_serve.telemetry.shared_file import SharedFile

__all__ = [
    "CHUNK",
    "CHUNK_MAGIC",
    "PAGE_BYTES",
    "SpoolHeader",
    "SpoolSource",
    "SpoolWriter",
    "parse_spool_header",
]

PAGE_BYTES = 4096
CHUNK = struct.Struct("<4sIQIIIB3x")  # magic, layer, batch, batch tokens, rows, columns, is decode
CHUNK_MAGIC = b"UEPC"
_MAGIC = b"UEPSPL\x00\x01"
# magic, batches, lost batches, batch open, number, level, rank, ranks, layers, experts,
# min_batch_tokens, is shared, engine
_LAYOUT = struct.Struct("<8sQQQIIIIIIII32s")
_MAX_LAYERS = 1 << 14
_COUNTERS_AT, _COUNTERS = 8, struct.Struct("<QQQ")  # of them: batches, lost batches, batch open


@dataclass(frozen=True)
class SpoolSource:
    """The rank whose tokens a spool holds."""

    rank: int
    num_ranks: int
    num_layers: int
    num_experts: int
    min_batch_tokens: int  # smaller batches are decode
    is_shared: bool  # all ranks see the same tokens, so only rank 0 records
    engine: str


@dataclass(frozen=True)
class SpoolHeader:
    """A spool's first page."""

    source: SpoolSource
    number: int  # of the recording
    level: RecordLevel
    batches: int  # complete ones with request tokens
    lost_batches: int  # that did not fit
    is_open: bool  # a batch is being written

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the arrays in the chunks."""
        if self.level is RecordLevel.LOADS:
            return np.dtype("<u4")
        return np.dtype("<i2" if self.source.num_experts < 1 << 15 else "<i4")


def parse_spool_header(page: bytes) -> SpoolHeader:
    """The header in ``page``, the first PAGE_BYTES of a spool. Raises SpoolError."""
    if len(page) < _LAYOUT.size:
        raise SpoolError("a spool is truncated; record again")
    magic, batches, lost, is_open, number, level, *numbers, engine = _LAYOUT.unpack_from(page)
    rank, ranks, layers, experts, min_tokens, shared = numbers
    valid = rank < ranks <= MAX_RANKS and 0 < layers <= _MAX_LAYERS and 0 < experts <= MAX_EXPERTS
    valid = valid and level in (RecordLevel.LOADS, RecordLevel.TOKENS)
    if magic != _MAGIC or not valid:
        raise SpoolError("a spool is damaged or of another version; use the server's own version")
    source = SpoolSource(
        rank=rank,
        num_ranks=ranks,
        num_layers=layers,
        num_experts=experts,
        min_batch_tokens=min_tokens,
        is_shared=bool(shared),
        engine=engine.rstrip(b"\0").decode("ascii", errors="replace"),
    )
    return SpoolHeader(source, number, RecordLevel(level), batches, lost, bool(is_open))


class SpoolWriter:
    """One rank's spool, open during a recording. Its methods never raise because of the file.

    For each batch call ``begin`` at its first layer, then ``add`` for every layer.
    """

    def __init__(self, run_path: Path, source: SpoolSource) -> None:
        self.is_recording = False  # this batch
        self._path, self._source = RunFiles(run_path).spool(source.rank), source
        self._batch = 0
        self._word = 0  # of the last recording
        self._file: SharedFile | None = None
        self._batches = self._lost = 0

    def begin(self, recording_word: int, batch_tokens: int) -> None:
        """Start a batch of ``batch_tokens`` over all ranks; record it if ``recording_word`` asks.

        Every rank must call this for every batch, so that all ranks number batches alike.
        """
        self._batch += 1
        if recording_word != self._word:
            self._follow(recording_word)
        if self._file is None:
            return
        self.is_recording = not self._full
        self._batch_tokens = batch_tokens
        self._count(lost=int(self._full))

    def add(self, layer: int, topk_ids: NDArray[np.integer]) -> None:
        """Append ``layer``'s ``topk_ids`` (T, K), logical, of this rank's own tokens."""
        experts = self._source.num_experts
        ids = topk_ids.clip(-1, experts)
        if self._level is RecordLevel.TOKENS:
            self._append(layer, ids.astype(self._dtype))
        else:  # the first and the last count are padding and invalid ids
            counts = np.bincount(ids.reshape(-1) + 1, minlength=experts + 2)
            self._append(layer, counts[1:-1].astype(self._dtype)[None])
        if layer == self._source.num_layers - 1:
            complete = int(self.is_recording and bool(topk_ids.size))
            self.is_recording = False
            self._count(batches=complete)

    def close(self) -> None:
        """End the current recording, if any; the file stays."""
        self.is_recording = False
        if self._file is not None:
            self._count()
            self._file.close()
            self._file = None

    def _count(self, *, batches: int = 0, lost: int = 0) -> None:
        """Add to the counters in the file, which also say whether a batch is being written."""
        self._batches, self._lost = self._batches + batches, self._lost + lost
        assert self._file is not None
        with contextlib.suppress(OSError):
            counters = _COUNTERS.pack(self._batches, self._lost, self.is_recording)
            self._file.write(counters, offset=_COUNTERS_AT)

    def _follow(self, word: int) -> None:
        self._word = word
        self.close()
        recording = Recording.from_word(word)
        if recording.level is RecordLevel.OFF:
            return
        self._level, self._limit = recording.level, recording.max_bytes
        self._size, self._full = PAGE_BYTES, False
        self._batches = self._lost = 0
        first = self._first_page(recording)
        self._dtype = parse_spool_header(first).dtype
        with contextlib.suppress(OSError):  # the recording client finds no spool and reports that
            self._file = SharedFile.create(self._path, first, PAGE_BYTES)

    def _first_page(self, recording: Recording) -> bytes:
        source = self._source
        counters = (0, 0, 0)
        sizes = (source.rank, source.num_ranks, source.num_layers, source.num_experts)
        rest = (source.min_batch_tokens, source.is_shared, source.engine.encode("ascii", "replace"))
        page = _LAYOUT.pack(_MAGIC, *counters, recording.number, recording.level, *sizes, *rest)
        return page.ljust(PAGE_BYTES, b"\0")

    def _append(self, layer: int, rows: NDArray[Any]) -> None:
        is_decode = self._batch_tokens < self._source.min_batch_tokens
        head = CHUNK.pack(
            CHUNK_MAGIC, layer, self._batch, self._batch_tokens, *rows.shape, is_decode
        )
        size = len(head) + rows.nbytes
        if self._size + size > self._limit or not self._write(head, rows):
            self._full, self.is_recording = True, False
            self._count(lost=1)
            return
        self._size += size

    def _write(self, head: bytes, rows: NDArray[Any]) -> bool:
        """Whether all was written; a partial write, where memory is full, is cut off again."""
        assert self._file is not None
        try:
            self._file.write(head + rows.tobytes(), offset=self._size)
        except OSError:
            with contextlib.suppress(OSError):
                self._file.cut(self._size)
            return False
        return True
