"""Rings: what is written is read, what is lost is counted, what is damaged is refused."""

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_serve.observability import Recorder, RingError, RingReader, RingState, ring_path
from ultraep_serve.observability.schema import (
    HEADER_BYTES,
    HEADER_DTYPE,
    RECORD_HEAD,
    record_dtype,
)
from ultraep_serve.types import Decision, ExpertShape, Policy

SHAPE = ExpertShape(num_ranks=4, num_logical_experts=20, num_replica_slots=2)


def create(run_path: Path, *, shape: ExpertShape = SHAPE, **changes: Any) -> Recorder:
    settings: dict[str, Any] = {
        "rank": 0,
        "num_layers": 3,
        "ring_records": 16,
        "engine": "vllm",
        "mode": "tensor",
        "slot_bytes": 4096,
        "timeout_seconds": 30.0,
    }
    return Recorder.create(run_path, shape=shape, **(settings | changes))


def write(recorder: Recorder, batch: int, layer: int = 0, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "tokens": 100,
        "decision": Decision.PLANNED,
        "policy": Policy.QUOTA,
        "replicas": 1,
        "bytes_sent": 10,
        "bytes_received": 20,
        "verb_ns": [1, 2, 3, 4, 5, 6, 7],
        "load_before": np.array([4, 0, 0, 0]),
        "load_after": np.array([1, 1, 1, 1]),
        "slot_expert": np.full((4, 2), -1),
    }
    recorder.record(layer=layer, batch=batch, **(fields | changes))


def test_a_record_comes_back_as_written(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    slots = np.arange(8).reshape(4, 2)
    assert RingReader(ring_path(tmp_path, 0)).header().last_batch_age_seconds(0) is None
    write(
        recorder,
        7,
        layer=2,
        tokens=1 << 20,
        bytes_sent=1 << 40,
        verb_ns=np.array([1, 2, 3, 4, 5, 6, 1 << 40]),
        load_before=np.array([9, 5, 3, 1]),
        slot_expert=slots,
        slot_load=slots + 100,
        expert_load=np.arange(20),
    )
    before_ns = time.time_ns()
    poll = RingReader(ring_path(tmp_path, 0)).poll()
    record = poll.records[0]
    assert (record["seq"], record["batch"], record["layer"]) == (1, 7, 2)
    assert (record["tokens"], record["assignments"]) == (1 << 20, 18)
    assert (record["bytes_sent"], record["bytes_received"]) == (1 << 40, 20)
    assert (record["decision"], record["policy"]) == (Decision.PLANNED, Policy.QUOTA.code)
    assert record["verb_ns"].tolist() == [1, 2, 3, 4, 5, 6, 1 << 40]
    assert poll.header.verb_ns[6] == 1 << 40
    assert record["load_before"].tolist() == [9, 5, 3, 1]
    assert record["load_after"].tolist() == [1, 1, 1, 1]
    assert record["slot_expert"].tolist() == slots.tolist()
    assert record["slot_load"].tolist() == (slots + 100).tolist()
    assert record["expert_load"].tolist() == list(range(20))
    age = poll.header.last_batch_age_seconds(time.monotonic_ns())
    assert age is not None
    assert 0 <= age < 60
    assert 0 < record["time_ns"] <= before_ns
    recorder.close()


def test_the_packed_head_is_the_dtype() -> None:
    fields = record_dtype(SHAPE).fields
    assert fields is not None
    assert fields["load_before"][1] == RECORD_HEAD.size
    assert HEADER_DTYPE.itemsize == HEADER_BYTES


@pytest.mark.parametrize(
    "shape", [ExpertShape(1, 1, 0), ExpertShape(2, 14, 0), ExpertShape(3, 21, 1)]
)
def test_any_shape_round_trips(tmp_path: Path, shape: ExpertShape) -> None:
    """One rank alone, no slots at all, and an odd number of ranks (records need padding)."""
    recorder = create(tmp_path, shape=shape)
    loads = np.arange(shape.num_ranks) + 1
    for batch in range(20):
        write(recorder, batch, load_before=loads, load_after=loads, slot_expert=None)
    records = RingReader(ring_path(tmp_path, 0)).poll().records
    assert recorder.lost == 0
    assert records["batch"].tolist() == list(range(4, 20))
    assert (records["load_after"] == loads).all()
    recorder.close()


def test_polls_return_each_record_once_and_count_the_missed(tmp_path: Path) -> None:
    recorder = create(tmp_path, ring_records=16)
    reader = RingReader(ring_path(tmp_path, 0))
    batch = 0
    for written, missed in ((3, 0), (0, 0), (16, 0), (15, 0), (17, 1), (100, 84)):
        for _ in range(written):
            write(recorder, batch)
            batch += 1
        poll = reader.poll()
        assert poll.missed == missed
        assert poll.records["batch"].tolist() == list(range(batch - written + missed, batch))
    assert reader.recent()["batch"].tolist() == list(range(batch - 16, batch))
    assert len(reader.poll().records) == 0
    recorder.close()


def test_a_bad_value_is_counted_and_written_nowhere(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    write(recorder, 0)
    write(recorder, 1, load_before=np.zeros(5))
    write(recorder, 1, bytes_sent=-1)
    write(recorder, 1, verb_ns=[1, 2])
    write(recorder, 1, decision=200)
    recorder.count_batch(17)  # type: ignore[arg-type]
    write(recorder, 2)
    poll = RingReader(ring_path(tmp_path, 0)).poll()
    assert poll.records["batch"].tolist() == [0, 2]
    assert poll.header.lost == recorder.lost == 5
    assert poll.header.layers[Decision.PLANNED] == 2
    recorder.close()
    write(recorder, 3)
    recorder.count_batch(Decision.SMALL)
    assert recorder.lost == 7
    recorder.count_lost()  # one that its maker had no room for
    assert recorder.lost == 8


def test_batches_are_counted_once_by_their_decision(tmp_path: Path) -> None:
    recorder = create(tmp_path, num_layers=3)
    planned, balanced, doubt = Decision.PLANNED, Decision.BALANCED, Decision.DOUBT
    for batch, decisions in enumerate(
        [[balanced, planned, balanced], [balanced] * 3, [planned] * 3, [doubt, balanced]]
    ):
        for layer, decision in enumerate(decisions):
            write(recorder, batch, layer, decision=decision)
    recorder.count_batch(Decision.SMALL)  # ends the batch of two layers
    header = RingReader(ring_path(tmp_path, 0)).header()
    assert header.batches == 5
    assert header.recorded_batches[planned] == 2
    assert header.recorded_batches[balanced] == 1
    assert header.recorded_batches[doubt] == 1
    assert header.skipped_batches[Decision.SMALL] == 1
    assert header.layers[Decision.SMALL] == 3
    assert (header.layers[planned], header.layers[balanced]) == (4, 6)
    recorder.close()


def test_the_policy_in_the_header_follows_the_batches(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    reader = RingReader(ring_path(tmp_path, 0))
    recorder.set_policy(Policy.IDEAL)
    assert reader.header().policy is Policy.IDEAL
    write(recorder, 0)
    recorder.count_batch(Decision.SMALL)  # says nothing about the policy
    assert reader.header().policy is Policy.QUOTA
    recorder.count_batch(Decision.POLICY_OFF)
    assert reader.header().policy is Policy.OFF
    recorder.close()


def test_states_and_heartbeat_decide_who_is_alive(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    reader = RingReader(ring_path(tmp_path, 0))
    assert reader.header().state is RingState.STARTING
    recorder.set_state(RingState.READY)
    beat = reader.header().heartbeat_ns
    assert reader.alive(beat + 4_000_000_000)
    assert not reader.alive(beat + 6_000_000_000)
    assert not reader.alive(beat - 60_000_000_000)  # from a boot that ran for longer
    recorder.close()
    assert reader.header().state is RingState.STOPPED
    assert not reader.alive(beat)
    recorder.close()


def test_a_failed_rank_stays_failed(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    recorder.set_state(RingState.FAILED)
    recorder.close()
    assert RingReader(ring_path(tmp_path, 0)).header().state is RingState.FAILED


def test_the_file_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    create(tmp_path).close()
    assert os.listdir(tmp_path) == ["ring-0"]
    assert ring_path(tmp_path, 0).stat().st_mode & 0o777 == 0o600


def test_a_ring_that_cannot_be_created_says_so(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="cannot create"):
        create(tmp_path / "missing")
    with pytest.raises(RingError, match="legal: 1 to"):
        create(tmp_path, ring_records=0)


def test_a_replaced_ring_is_reopened(tmp_path: Path) -> None:
    first = create(tmp_path)
    write(first, 0)
    reader = RingReader(ring_path(tmp_path, 0))
    reader.poll()
    second = create(tmp_path, shape=ExpertShape(2, 8, 1), ring_records=32)
    write(second, 5, load_before=[1, 2], load_after=[1, 2], slot_expert=None)
    write(first, 1)  # the old writer writes to a file without a name
    poll = reader.poll()
    assert poll.replaced
    assert poll.records["batch"].tolist() == [5]
    assert not reader.poll().replaced
    ring_path(tmp_path, 0).unlink()
    with pytest.raises(RingError, match="gone"):
        reader.poll()
    first.close()
    second.close()


def hammer(run_path: Path, stop: Any) -> None:
    """Write as fast as possible: every field of record b is a function of b."""
    recorder = create(run_path, ring_records=16, shape=ExpertShape(64, 64, 8))
    batch = 0
    while not stop.is_set():
        loads = np.full(64, batch % (1 << 20))
        write(
            recorder,
            batch,
            load_before=loads,
            load_after=loads,
            slot_expert=np.tile(loads, 8).reshape(64, 8),
        )
        batch += 1
    recorder.close()


def test_no_torn_record_is_accepted_while_a_writer_races(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    writer = context.Process(target=hammer, args=(tmp_path, stop))
    writer.start()
    try:
        while not ring_path(tmp_path, 0).exists():
            time.sleep(0.01)
        reader = RingReader(ring_path(tmp_path, 0))
        seen = missed = 0
        while seen < 3000:
            poll = reader.poll()
            expected = (poll.records["batch"] % (1 << 20)).astype(np.int64)[:, None]
            assert (poll.records["load_before"] == expected).all()
            assert (poll.records["slot_expert"] == expected[:, :, None]).all()
            seen += len(poll.records)
            missed += poll.missed
            assert seen + missed == poll.header.written
    finally:
        stop.set()
        writer.join(30)
    assert writer.exitcode == 0


def damage(path: Path, field: str, value: Any) -> None:
    page = np.frombuffer(path.read_bytes()[:HEADER_BYTES], HEADER_DTYPE).copy()
    page[field] = value
    with path.open("r+b") as file:
        file.write(page.tobytes())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", b"notring"),
        ("schema_version", 1),
        ("header_bytes", 8192),
        ("record_bytes", 8),
        ("capacity", 0),
        ("capacity", (1 << 32) - 1),
        ("rank", 3),
        ("rank", 4),
        ("num_ranks", 0),
        ("num_ranks", (1 << 32) - 1),
        ("num_replica_slots", 3),
        ("num_logical_experts", 0),
        ("state", 9),
        ("policy", 9),
        ("timeout_seconds", float("nan")),
        ("written", (1 << 64) - 1),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    recorder = create(tmp_path)
    path = ring_path(tmp_path, 0)
    reader = RingReader(path)
    damage(path, field, value)
    with pytest.raises(RingError):
        reader.poll()
    with pytest.raises(RingError):
        RingReader(path)
    recorder.close()


def test_claims_beyond_the_file_are_refused_or_counted(tmp_path: Path) -> None:
    create(tmp_path).close()
    path = ring_path(tmp_path, 0)
    damage(path, "written", 1 << 61)
    poll = RingReader(path).poll()  # places that were never written hold no such record
    assert (len(poll.records), poll.missed) == (0, 1 << 61)
    os.truncate(path, HEADER_BYTES + 100)
    with pytest.raises(RingError, match="cut short"):
        RingReader(path).poll()
    os.truncate(path, 100)
    with pytest.raises(RingError, match="cut short"):
        RingReader(path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    for batch in range(3):
        write(recorder, batch)
    place = HEADER_BYTES + record_dtype(SHAPE).itemsize + RECORD_HEAD.size + 1
    path = ring_path(tmp_path, 0)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    poll = RingReader(path).poll()
    assert poll.records["batch"].tolist() == [0, 2]
    assert poll.missed == 1
    recorder.close()


def test_no_splice_of_two_records_is_accepted(tmp_path: Path) -> None:
    """Every state in which a copy over an older record can be caught, in either direction."""
    recorder = create(tmp_path, ring_records=1)
    path, size = ring_path(tmp_path, 0), record_dtype(SHAPE).itemsize
    write(recorder, 0)
    old = path.read_bytes()[HEADER_BYTES:]
    write(recorder, 1, tokens=7, load_before=np.array([5, 6, 7, 8]), slot_expert=None)
    new = path.read_bytes()[HEADER_BYTES:]
    recorder.close()
    cuts = [cut for cut in range(size) if old[:cut] != new[:cut] and old[cut:] != new[cut:]]
    for cut in cuts:
        for splice in (new[:cut] + old[cut:], old[:cut] + new[cut:]):
            for written in (1, 2):
                damage(path, "written", written)
                with path.open("r+b") as file:
                    file.seek(HEADER_BYTES)
                    file.write(splice)
                assert len(RingReader(path).poll().records) == 0
    assert len(cuts) > 80


def test_random_bytes_raise_nothing_but_ring_errors(tmp_path: Path) -> None:
    create(tmp_path).close()
    path = ring_path(tmp_path, 0)
    original = path.read_bytes()
    source = random.Random(0)
    for size in (0, 1, 4095, 4096, 9000):
        path.write_bytes(source.randbytes(size))
        with pytest.raises(RingError):
            RingReader(path)
    for _ in range(300):
        data = bytearray(original)
        for _ in range(source.randrange(1, 40)):
            data[source.randrange(8, 400)] = source.randrange(256)
        path.write_bytes(data)
        try:
            RingReader(path).poll()
        except RingError:
            continue


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for number, make in enumerate(
        [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), lambda path: None]
    ):
        path = ring_path(tmp_path, number)
        make(path)
        with pytest.raises(RingError, match="cannot open"):
            RingReader(path)
