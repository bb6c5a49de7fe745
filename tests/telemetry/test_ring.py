"""Rings: what is written is read, what is lost is counted, who writes is known."""

import os
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.support.ring_files import create, planned, write
from ultraep_serve.errors import RingError
from ultraep_serve.telemetry import recorder as recorder_module
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import (
    RingState,
)
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, Policy


def test_a_record_comes_back_as_written(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    slots = np.arange(8).reshape(4, 2)
    assert RingReader(RunFiles(tmp_path).ring(0)).header().last_batch_age_seconds(0) is None
    write(
        recorder,
        7,
        layer=2,
        tokens=1 << 20,
        bytes_sent=1 << 40,
        stage_ns=np.array([1, 2, 3, 4, 5, 6, 1 << 40]),
        load_before=np.array([9, 5, 3, 1]),
        slot_expert=slots,
        slot_load=slots + 100,
        expert_load=np.arange(20),
        own_load=np.arange(20) // 2,
    )
    before_ns = time.time_ns()
    poll = RingReader(RunFiles(tmp_path).ring(0)).poll()
    record = poll.records[0]
    assert (record["seq"], record["batch"], record["layer"]) == (1, 7, 2)
    assert record["tokens"] == 1 << 20
    assert (record["bytes_sent"], record["bytes_received"]) == (1 << 40, 20)
    assert (record["decision"], record["policy"]) == (Decision.PLANNED, Policy.QUOTA.code)
    assert record["stage_ns"].tolist() == [1, 2, 3, 4, 5, 6, 1 << 40]
    assert poll.header.stage_ns[6] == 1 << 40
    assert record["load_before"].tolist() == [9, 5, 3, 1]
    assert record["load_after"].tolist() == [1, 1, 1, 1]
    assert record["slot_expert"].tolist() == slots.tolist()
    assert record["slot_load"].tolist() == (slots + 100).tolist()
    assert record["expert_load"].tolist() == list(range(20))
    assert record["own_load"].tolist() == (np.arange(20) // 2).tolist()
    age = poll.header.last_batch_age_seconds(time.monotonic_ns())
    assert age is not None
    assert 0 <= age < 60
    assert 0 < record["time_ns"] <= before_ns
    recorder.close()


def test_polls_return_each_record_once_and_count_the_missed(tmp_path: Path) -> None:
    recorder = create(tmp_path, ring_records=16)
    reader = RingReader(RunFiles(tmp_path).ring(0))
    layer = 0
    for written, missed in ((3, 0), (0, 0), (16, 0), (15, 0), (17, 1), (100, 84)):
        if written:
            record = planned(0, layer + np.arange(written))
            recorder.record_batch(record, written)
        layer += written
        poll = reader.poll()
        assert poll.missed == missed
        assert poll.records["layer"].tolist() == list(range(layer - written + missed, layer))
    assert len(reader.poll().records) == 0
    recorder.close()


def test_a_bad_value_is_counted_and_written_nowhere(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    write(recorder, 0)
    write(recorder, 1, load_before=np.zeros(5))
    write(recorder, 1, bytes_sent=-1)
    write(recorder, 1, stage_ns=[1, 2])
    write(recorder, 1, decision=200)
    recorder.count_batch(17)  # type: ignore[arg-type]
    write(recorder, 2)
    poll = RingReader(RunFiles(tmp_path).ring(0)).poll()
    assert poll.records["batch"].tolist() == [0, 2]
    assert poll.header.lost == recorder.lost == 5
    assert poll.header.layers[Decision.PLANNED] == 2
    recorder.close()
    write(recorder, 3)
    recorder.count_batch(Decision.SMALL)
    assert recorder.lost == 7


def test_batches_are_counted_once_by_their_decision(tmp_path: Path) -> None:
    recorder = create(tmp_path, num_layers=3)
    followed, balanced, inconsistent = Decision.PLANNED, Decision.BALANCED, Decision.INCONSISTENT
    for batch, decisions in enumerate(
        [[balanced, followed, balanced], [balanced] * 3, [followed] * 3, [inconsistent, balanced]]
    ):
        layers = np.arange(len(decisions))
        recorder.record_batch(planned(batch, layers, decision=decisions), len(decisions))
    recorder.count_batch(Decision.SMALL)
    header = RingReader(RunFiles(tmp_path).ring(0)).header()
    assert header.batches == 5
    assert header.recorded_batches[followed] == 2
    assert header.recorded_batches[balanced] == 1
    assert header.recorded_batches[inconsistent] == 1
    assert header.skipped_batches[Decision.SMALL] == 1
    assert header.layers[Decision.SMALL] == 3
    assert (header.layers[followed], header.layers[balanced]) == (4, 6)
    recorder.close()


def test_states_and_heartbeat_decide_who_is_alive(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    reader = RingReader(RunFiles(tmp_path).ring(0))
    assert reader.header().state is RingState.STARTING
    recorder.set_state(RingState.READY)
    beat = reader.header().heartbeat_ns
    assert reader.header().alive(beat + 4_000_000_000)
    assert not reader.header().alive(beat + 6_000_000_000)
    assert not reader.header().alive(beat - 60_000_000_000)  # of an earlier boot
    recorder.close()
    assert reader.header().state is RingState.STOPPED
    assert not reader.header().alive(beat)
    recorder = create(tmp_path)
    recorder.set_state(RingState.FAILED)
    recorder.close()
    assert RingReader(RunFiles(tmp_path).ring(0)).header().state is RingState.FAILED


def test_the_file_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    create(tmp_path).close()
    assert os.listdir(tmp_path) == ["ring-0"]
    assert RunFiles(tmp_path).ring(0).stat().st_mode & 0o777 == 0o600
    with pytest.raises(RingError, match=r"cannot create .*; give /dev/shm more room: docker run"):
        create(tmp_path / "missing")


@pytest.mark.parametrize("damage", ["deleted", "replaced", "truncated"])
def test_a_damaged_ring_is_written_on_and_the_log_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    monkeypatch.setattr(recorder_module, "HEARTBEAT_SECONDS", 0.005)
    recorder, path = create(tmp_path), RunFiles(tmp_path).ring(0)
    page = ControlPage.create(tmp_path, Policy.QUOTA)
    recorder.watch(page.file)
    reader = RingReader(path)
    for file in (path, page.file.path):
        os.truncate(file, 5000 if file == path else 0) if damage == "truncated" else file.unlink()
        if damage == "replaced":
            file.write_bytes(b"")
    beats = count()
    recorder.at_heartbeat(lambda: next(beats))
    write(recorder, 0)
    with pytest.raises(RingError, match=damage if damage != "replaced" else "truncated"):
        reader.poll()
    while next(beats) < 20:
        time.sleep(0.005)
    assert not recorder.lost
    recorder.close()
    (said,) = caplog.messages
    assert f"ring-0 was {damage}; this server serves on" in said
