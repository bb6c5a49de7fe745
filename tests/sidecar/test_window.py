"""What the sidecar holds in memory: rows of 15 minutes, bounded, filled in by all ranks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.ring_files import create, planned
from ultraep_serve.sidecar import window
from ultraep_serve.sidecar.window import StageWindow
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)
SECOND = 10**9


class Ranks:
    """Both ranks' rings of a stage of one layer."""

    def __init__(self, path: Path) -> None:
        self.recorders = [
            create(path, rank, SHAPE, num_layers=1, ring_records=64) for rank in (0, 1)
        ]
        self._readers = [RingReader(RunFiles(path).ring(rank)) for rank in (0, 1)]

    @property
    def header(self) -> RingHeader:
        return self._readers[0].header()

    def write(self, rank: int, batch: int, second: int = 1) -> None:
        loads = np.array([30, 10])
        record = planned(batch, bytes_sent=100 + rank, load_before=loads, load_after=loads // 2)
        self.recorders[rank].record_batch(record, 1, second * SECOND)

    def read(self, rank: int) -> RecordArray:
        return self._readers[rank].poll().records


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for recorder in made.recorders:
        recorder.close()


def test_one_row_has_what_both_ranks_told_whichever_was_read_first(ranks: Ranks) -> None:
    made = StageWindow(ranks.header, first_layer=5)
    for rank, batches in ((0, (1, 2)), (1, (1, 2, 3)), (0, (3, 4)), (1, (4,))):
        for batch in batches:
            ranks.write(rank, batch)
        made.add(rank, ranks.read(rank))
    assert made.rows["batch"].tolist() == [1, 2, 3, 4]
    assert made.rows["bytes_sent"].tolist() == [[100, 101]] * 4
    assert set(made.rows["layer"].tolist()) == {5}


def test_a_record_that_one_rank_lost_takes_nothing_of_the_others(ranks: Ranks) -> None:
    made = StageWindow(ranks.header, 0)
    for rank, batches in ((0, (1, 3)), (1, (1, 2, 3))):
        for batch in batches:
            ranks.write(rank, batch)
        made.add(rank, ranks.read(rank))
    assert made.rows["batch"].tolist() == [1, 3]
    assert made.rows["bytes_sent"].tolist() == [[100, 101]] * 2


def test_fifteen_minutes_are_held_up_to_the_newest_row(ranks: Ranks) -> None:
    made = StageWindow(ranks.header, 0)
    for batch, second in enumerate((1000, 1100, 1899, 1900, 2001)):
        ranks.write(0, batch, second)
        made.add(0, ranks.read(0))
    assert made.rows["batch"].tolist() == [2, 3, 4]


def test_rows_are_bounded_and_the_newest_stay(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_MAX_BYTES", 3_500)
    made = StageWindow(ranks.header, 0)
    before, held = made.rows, []
    for batch in range(100):
        ranks.write(0, batch)
        if batch % 7 == 6:
            made.add(0, ranks.read(0))
            batches = made.rows["batch"]
            assert batches.tolist() == list(range(batch + 1 - len(batches), batch + 1))
            assert len(batches.base) <= 64
            held.append(len(batches))
    assert 7 < max(held) == held[-1] < 20
    assert not len(before)  # what was given out stays as it was
