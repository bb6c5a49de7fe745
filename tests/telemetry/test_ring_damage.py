"""Rings that are damaged, torn or no rings at all: refused or counted, never believed."""

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ring_files import SHAPE, create, write
from ultraep_serve.errors import RingError
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import record_dtype
from ultraep_serve.telemetry.ring import HEADER_BYTES, HEADER_DTYPE, RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape


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
    path = RunFiles(tmp_path).ring(0)
    reader = RingReader(path)
    damage(path, field, value)
    with pytest.raises(RingError):
        reader.poll()
    with pytest.raises(RingError):
        RingReader(path)
    recorder.close()


def test_claims_beyond_the_file_are_refused_or_counted(tmp_path: Path) -> None:
    create(tmp_path).close()
    path = RunFiles(tmp_path).ring(0)
    damage(path, "written", 1 << 61)
    poll = RingReader(path).poll()  # places that were never written hold no such record
    assert (len(poll.records), poll.missed) == (0, 1 << 61)
    os.truncate(path, HEADER_BYTES + 100)
    with pytest.raises(RingError, match="truncated"):
        RingReader(path).poll()
    os.truncate(path, 100)
    with pytest.raises(RingError, match="truncated"):
        RingReader(path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    recorder = create(tmp_path)
    for batch in range(3):
        write(recorder, batch)
    fields = record_dtype(SHAPE).fields
    assert fields is not None
    place = HEADER_BYTES + record_dtype(SHAPE).itemsize + fields["load_before"][1] + 1
    path = RunFiles(tmp_path).ring(0)
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
    path, size = RunFiles(tmp_path).ring(0), record_dtype(SHAPE).itemsize
    write(recorder, 0)
    old = path.read_bytes()[HEADER_BYTES:]
    write(recorder, 1, tokens=7, load_before=np.array([5, 6, 7, 8]), slot_expert=-1)
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
        while not RunFiles(tmp_path).ring(0).exists():
            time.sleep(0.01)
        reader = RingReader(RunFiles(tmp_path).ring(0))
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


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for number, make in enumerate(
        [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), lambda path: None]
    ):
        path = RunFiles(tmp_path).ring(number)
        make(path)
        with pytest.raises(RingError, match=r"cannot open|was deleted"):
            RingReader(path)


def test_whoever_writes_goes_on_over_damage(tmp_path: Path) -> None:
    """A rank believes nothing of what it finds in its own ring."""
    recorder = create(tmp_path)
    path = RunFiles(tmp_path).ring(0)
    size = path.stat().st_size
    for seed in range(20):
        with path.open("r+b") as file:
            file.write(random.Random(seed).randbytes(size))
        for batch in range(40):  # more than the ring holds
            write(recorder, batch)
        recorder.count_batch(Decision.SMALL)
        recorder.set_state(RingState.READY)
    recorder.close()
