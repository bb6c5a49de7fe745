"""Rings that are damaged, torn or no rings at all: refused or counted, never believed."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ring_files import SHAPE, create, write
from ultraep_serve.errors import RingError
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import record_dtype
from ultraep_serve.telemetry.ring import HEADER_BYTES, HEADER_DTYPE
from ultraep_serve.telemetry.run_files import RunFiles


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


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    for number, make in enumerate(
        [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), lambda path: None]
    ):
        path = RunFiles(tmp_path).ring(number)
        make(path)
        with pytest.raises(RingError, match=r"cannot open|was deleted"):
            RingReader(path)
