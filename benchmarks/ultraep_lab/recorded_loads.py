"""What a server's ranks record -> a trace of loads, from their rings on this machine.

A rank records, of each layer of a prefill batch, how many assignments its own tokens gave each
expert. Where micro-batches overlap, each is a batch of its own. In a pipeline the first stage is
recorded.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.errors import TraceError
from ultraep_lab.store import MAX_BYTES
from ultraep_lab.trace import PREFILL, LoadTrace
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import IntArray, TokenView

BASIS = "recorded while serving"
_Rows = dict[tuple[int, int], IntArray]  # own loads (E,) by layer and rank


class LoadRecording:
    """All batches that begin after this was made; ``poll`` more often than rings are full.

    Methods raise RingError where a ring is no longer there.
    """

    def __init__(self, run_path: Path) -> None:
        """Raises TraceError where not all ranks whose loads differ are on this machine."""
        files = RunFiles(run_path)
        readers = [RingReader(files.ring(number)) for number in files.rings()]
        here = {reader.header().rank: reader for reader in readers if _is_first_stage(reader)}
        if not here:
            raise TraceError(f"no rank of a first pipeline stage has a ring in {run_path}")
        self._header = header = here[min(here)].header()
        self._is_shared = header.mode == TokenView.SHARED.value
        ranks = range(1 if self._is_shared else header.shape.num_ranks)
        if missing := sorted(set(ranks) - set(here)):
            raise TraceError(
                f"ranks {missing} are on other hosts; record where all ranks are on one, or on the "
                "first host of a server whose ranks all see the same tokens"
            )
        self._readers = {rank: here[rank] for rank in ranks}
        self._lost = dict.fromkeys(ranks, 0)
        self._begin()
        self.poll()
        self._begin()  # all that is older is left out

    def _begin(self) -> None:
        self._batches: dict[tuple[int, int], _Rows] = {}  # by number, and which micro-batch
        self._whole: list[tuple[int, int]] = []
        self.missed = 0  # records of layers that could not be written, or were not read in time

    @property
    def num_batches(self) -> int:
        """Batches with all layers of all ranks."""
        return len(self._whole)

    @property
    def is_full(self) -> bool:
        """Whether a trace of one more batch might have more than ``replay`` reads."""
        return (self.num_batches + 1) * self._num_rows * self._row_bytes > MAX_BYTES

    @property
    def _num_rows(self) -> int:
        return self._header.num_layers * len(self._readers)

    @property
    def _row_bytes(self) -> int:
        return 4 * self._header.shape.num_logical_experts

    def poll(self) -> None:
        """Take what ranks have recorded since the last call."""
        for rank, reader in self._readers.items():
            poll = reader.poll()
            if poll.replaced:
                raise TraceError("the server was started again meanwhile; record again")
            self.missed += poll.missed + poll.header.lost - self._lost[rank]
            self._lost[rank] = poll.header.lost
            for record in poll.records:
                self._add(rank, record)

    def _add(self, rank: int, record: np.void) -> None:
        batch, place, micro_batch = int(record["batch"]), (int(record["layer"]), rank), 0
        while place in (rows := self._batches.setdefault((batch, micro_batch), {})):
            micro_batch += 1
        rows[place] = record["own_load"].copy()
        if len(rows) == self._num_rows:
            self._whole.append((batch, micro_batch))

    def trace(self, limit: int | None = None) -> LoadTrace:
        """The first ``limit`` whole batches; None is all.

        ``loads`` are int32 (batches, layers, R, E), or (batches, layers, E) where all ranks see the
        same tokens. Raises TraceError where there is no whole batch.
        """
        whole = sorted(self._whole)[:limit]
        if not whole:
            raise TraceError(
                "no whole batch was recorded; send prompts meanwhile that are large enough to be "
                "balanced, while policy quota is in force"
            )
        loads = np.stack([self._loads(self._batches[key]) for key in whole])
        phase = np.full(len(whole), PREFILL, np.uint8)
        return LoadTrace(loads, phase, self._metadata(len(whole)))

    def _loads(self, rows: _Rows) -> NDArray[np.int32]:
        in_order = np.stack([rows[place] for place in sorted(rows)])
        num_layers, num_experts = self._header.num_layers, in_order.shape[1]
        sources = () if self._is_shared else (len(self._readers),)
        return in_order.reshape(num_layers, *sources, num_experts)

    def _metadata(self, batches: int) -> dict[str, Any]:
        header = self._header
        return {
            "source": "ultraep-serve record",
            "basis": BASIS,
            "engine": header.engine,
            "mode": header.mode,
            "ranks": header.shape.num_ranks,
            "num_experts": header.shape.num_logical_experts,
            "layers": header.num_layers,
            "batches": batches,
            "missed_records": self.missed,
        }

    def close(self) -> None:
        """Close the rings."""
        for reader in self._readers.values():
            reader.close()


def _is_first_stage(reader: RingReader) -> bool:
    return reader.header().pipeline_stage == 0
