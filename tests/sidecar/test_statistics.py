"""Figures against records small enough to work out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ring_files import create, write
from ultraep_lab.imbalance import imbalance
from ultraep_serve.sidecar.balance import summarise
from ultraep_serve.sidecar.figures import mean_floor, rank_speeds
from ultraep_serve.sidecar.layers import batch_list
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.sidecar.window import StageWindow
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=4, num_replica_slots=1)


@pytest.fixture
def recorders(tmp_path: Path) -> Any:
    """Two ranks' recorders, and a function that reads what they wrote."""
    made = [create(tmp_path, shape=SHAPE, rank=rank, ring_records=64) for rank in (0, 1)]
    yield made, lambda: RunStore(tmp_path).poll()
    for recorder in made:
        recorder.close()


def write_all(
    recorders: list[Recorder],
    batch: int,
    layer: int,
    before: list[int],
    after: list[int],
    decision: Decision = Decision.PLANNED,
    policy: Policy = Policy.QUOTA,
    speed: list[int] | None = None,
) -> None:
    """Every rank writes the same loads; rank r sends r * 100 bytes and takes r + 1 s to plan."""
    for rank, recorder in enumerate(recorders):
        write(
            recorder,
            batch,
            layer,
            tokens=sum(before),
            decision=decision,
            policy=policy,
            replicas=layer,
            bytes_sent=100 * rank,
            bytes_received=7,
            stage_ns=[0, 0, (rank + 1) * 10**9, 0, 0, 0, 0],
            load_before=np.array(before),
            load_after=np.array(after),
            slot_expert=np.array([[-1], [layer]]),
            speed=speed,
        )


def test_a_summary_by_hand(recorders: Any) -> None:
    made, read = recorders
    write_all(made, 0, 0, [30, 10], [20, 20])  # 1.5 -> 1.0
    write_all(made, 0, 1, [20, 20], [20, 20], Decision.BALANCED)  # 1.0
    write_all(made, 1, 1, [40, 0], [30, 10])  # 2.0 -> 1.5
    write_all(made, 2, 0, [9, 0], [9, 0], Decision.INCONSISTENT)  # never planned
    write_all(made, 3, 0, [0, 9], [0, 9], Decision.FORCED, Policy.IDEAL)
    for _ in range(3):
        made[0].count_batch(Decision.SMALL)
    result = summarise(read())
    assert (result.engine, result.mode, result.num_ranks) == ("vllm", "tensor", 2)
    assert result.window_records == 3
    assert result.imbalance.before.mean == 1.5
    assert (result.imbalance.before.p50, result.imbalance.before.max) == (1.5, 2.0)
    assert result.imbalance.after.mean == pytest.approx(3.5 / 3)
    assert (result.replicas.mean, result.replicas.max) == (pytest.approx(2 / 3), 1)
    assert result.bytes_moved == 300  # rank 1's three records
    assert (result.batches.planned, result.batches.skipped["small"]) == (2, 3)
    assert [(layer.layer, layer.records) for layer in result.layers] == [(0, 1), (1, 2)]
    assert [layer.bytes_moved for layer in result.layers] == [100, 200]
    assert [rank.assignments.before for rank in result.ranks] == [90, 30]
    assert [rank.assignments.after for rank in result.ranks] == [70, 50]
    assert [rank.stage_seconds["plan"] for rank in result.ranks] == [1.0, 2.0]


def test_times_are_assignments_over_speeds(recorders: Any, tmp_path: Path) -> None:
    made, read = recorders
    write_all(made, 0, 0, [30, 0], [20, 10], speed=[1024, 512])
    write_all(made, 1, 1, [20, 20], [20, 20])
    result = summarise(read())
    assert result.imbalance.after.max == pytest.approx(4 / 3)
    assert result.time_imbalance.before.max == 1.5  # 30 instead of 20
    assert result.time_imbalance.after.max == 1.0
    assert [layer.time_imbalance.before.max for layer in result.layers] == [1.5, 1.0]
    assert [rank.assignments.speed for rank in result.ranks] == [1.0, 0.75]
    rows = read().held().rows
    assert rows["time_before"].tolist() == [
        imbalance(*row) for row in zip(rows["load_before"], rows["speed"], strict=True)
    ]
    assert rank_speeds(rows) == [1.0, 1.0]
    assert mean_floor(rows) == 1.0
    header = RingReader(RunFiles(tmp_path).ring(0)).header()
    apart = replace(header, domain_size=1)
    records = RingReader(RunFiles(tmp_path).ring(0)).poll().records
    alone = StageWindow(apart, 0).add(0, records)
    assert mean_floor(alone) == 1.25  # each rank a domain: nothing can move


def test_batches_are_put_together_from_layers(recorders: Any) -> None:
    made, read = recorders
    write_all(made, 4, 0, [20, 20], [20, 20], Decision.BALANCED)
    write_all(made, 4, 1, [30, 10], [20, 20])
    write_all(made, 5, 0, [8, 8], [8, 8], Decision.BALANCED)
    held = read().held()
    newest, older = batch_list(held, 9, None).batches
    assert (newest.batch, older.batch) == (5, 4)
    assert older.layers == {"planned": 1, "balanced": 1}
    assert (older.tokens, older.replicas, older.bytes_moved) == (40, 1, 200)
    assert older.imbalance.before.max == 1.5
    assert [b.batch for b in batch_list(held, 1, None).batches] == [5]
