"""What the sidecar holds in memory: records, sums per second, skipped batches; all bounded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.ring_files import create, write
from ultraep_serve.sidecar.memory import (
    OWN_DTYPE,
    RecordWindow,
    SkippedHistory,
    most_records,
    skipped_since,
)
from ultraep_serve.sidecar.statistics.fold import imbalance_snapshot, with_figures
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape

SHAPE = ExpertShape(num_ranks=4, num_logical_experts=8, num_replica_slots=1)
SECOND = 10**9


@pytest.fixture
def records(tmp_path: Path) -> RecordArray:
    """300 batches of two layers, three batches per second from second 1000 on."""
    random = np.random.default_rng(0)
    recorder = create(tmp_path, shape=SHAPE, num_layers=2, ring_records=1024)
    for number in range(600):
        write(
            recorder,
            number // 2,
            number % 2,
            decision=Decision.PLANNED if number % 4 == 3 else Decision.BALANCED,
            bytes_sent=100,
            stage_ns=[1000] * 7,
            load_before=random.integers(1, 1000, 4),
            load_after=np.full(4, 10) + random.integers(0, 2, 4),
            slot_expert=-1,
        )
    found = RingReader(RunFiles(tmp_path).ring(0)).poll().records
    recorder.close()
    found["time_ns"] = (1000 + found["batch"] // 3) * SECOND
    return with_figures(found, 4)


def test_seconds_add_up_whatever_the_pieces(records: RecordArray) -> None:
    timeline = Timeline()
    for begin in range(0, 600, 7):  # a piece ends within a batch
        piece = records[begin : begin + 7]
        timeline.add(piece)
        timeline.add_batches(piece)
        timeline.add_own(0, piece)
    totals = timeline.totals(1099, 100)
    exact = imbalance_snapshot(records)
    for when in ("before", "after"):
        found, wanted = getattr(totals.imbalance, when), getattr(exact, when)
        assert found.mean == pytest.approx(wanted.mean)
        assert found.max == wanted.max
        assert found.p50 - 1 == pytest.approx(wanted.p50 - 1, rel=0.1, abs=1e-3)
        assert found.p99 - 1 == pytest.approx(wanted.p99 - 1, rel=0.1, abs=1e-3)
    assert totals.bytes_sent == 60_000
    assert totals.batches[Decision.PLANNED] == totals.batches[Decision.BALANCED] == 150
    assert timeline.totals(1099, 10).bytes_sent == 6_000
    assert timeline.totals(2000, 10).imbalance.before.mean is None
    history = timeline.history(1099, 100, 10)
    assert history.batches == [30] * 10


def test_old_seconds_give_way(records: RecordArray) -> None:
    timeline = Timeline(max_seconds=20)
    timeline.add_own(3, records)  # the ranks below have nothing
    assert timeline.totals(1099, 100).bytes_sent == 20 * 6 * 100
    timeline.add_own(3, records[:6])  # of a second that is gone
    assert timeline.totals(1099, 100).bytes_sent == 20 * 6 * 100
    spent = timeline.totals(1099, 1).savings.spent_seconds
    assert spent == pytest.approx(6 * 6e-6)  # a rank without records did not wait least


def test_a_window_keeps_the_newest_in_bounded_memory() -> None:
    window = RecordWindow(OWN_DTYPE, 100)
    for number in range(1000):
        piece = np.zeros(7, OWN_DTYPE)
        piece["batch"] = 7 * number + np.arange(7)
        window.append(piece)
        held = window.records()
        assert held["batch"][-1] == 7 * number + 6
        assert held.base is not None
        assert len(held.base) <= 132
    assert held["batch"].tolist() == list(range(6900, 7000))


def test_all_ranks_together_stay_in_bounds() -> None:
    shape = ExpertShape(num_ranks=512, num_logical_experts=4096, num_replica_slots=8)
    most = most_records(shape, 1 << 20)
    assert 1 <= most * 512 * OWN_DTYPE.itemsize < 64 << 20


def header(small: int) -> Any:
    """As much of a ring's as counts here."""
    skipped = tuple(small if decision is Decision.SMALL else 0 for decision in Decision)
    return SimpleNamespace(started_ns=1000 * SECOND, skipped_batches=skipped)


def small_since(history: SkippedHistory, second: int) -> int:
    return skipped_since(history.records(), second * SECOND)[Decision.SMALL]


def test_what_was_skipped_before_the_sidecar_came_is_spread_evenly() -> None:
    history = SkippedHistory(max_changes=8)
    history.observe(1100 * SECOND, header(500))
    assert [small_since(history, second) for second in (900, 1000, 1060, 1100)] == [
        500,
        500,
        200,
        0,
    ]
    for second in range(1101, 1120):
        history.observe(second * SECOND, header(second))
        assert small_since(history, second) == 0
    assert small_since(history, 1118) == 1
    assert small_since(history, 900) <= 8  # as far back as there is room
