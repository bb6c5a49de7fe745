"""Traces on disk: what goes in comes out, and what nobody should trust is refused."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_lab.errors import TraceError
from ultraep_lab.store import load_trace, save_trace
from ultraep_lab.trace import (
    DECODE,
    PREFILL,
    LoadTrace,
    Trace,
    batches,
    of_phase,
)


def token_trace(num_tokens: int = 20, num_experts: int = 8) -> Trace:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, num_experts, (num_tokens, 3, 2)).astype(np.uint8)
    lengths = np.array([5, num_tokens - 5], np.int32)
    phase = np.full(num_tokens, DECODE, np.uint8)
    return Trace(ids, lengths, num_experts, phase, {"model": "made up"})


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_token_trace_round_trip(tmp_path: Path) -> None:
    trace = token_trace()
    save_trace(tmp_path / "t.npz", trace)
    found = load_trace(tmp_path / "t.npz")
    assert isinstance(found, Trace)
    assert np.array_equal(found.topk_ids, trace.topk_ids)
    assert found.topk_ids.dtype == np.uint8
    assert np.array_equal(found.sequence_lengths, trace.sequence_lengths)
    assert found.phase is not None
    assert found.phase.tolist() == [DECODE] * 20
    assert found.num_experts == 8
    assert found.metadata["model"] == "made up"


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 3, 8), (0, 3, 8)])
def test_load_trace_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    loads = np.random.default_rng(0).integers(0, 5, shape).astype(np.int32)
    trace = LoadTrace(loads, np.arange(shape[0]) % 2, {"model": "made up"})
    save_trace(tmp_path / "t.npz", trace)
    found = load_trace(tmp_path / "t.npz")
    assert isinstance(found, LoadTrace)
    assert np.array_equal(found.loads, loads)
    assert found.phase is not None
    assert found.phase.tolist() == [0, 1][: shape[0]]
    assert found.metadata == {"model": "made up"}


def test_batches_are_consecutive_tokens_split_contiguously() -> None:
    ids = np.arange(12, dtype=np.int16).reshape(12, 1, 1)
    ids[4] = -1  # padding never counts
    trace = Trace(ids, np.array([12]), 12)
    cut = [batch[0] for batch in batches(trace, 5, 2)]
    assert len(cut) == 2  # two tokens are left over
    chosen = [[np.flatnonzero(row).tolist() for row in loads] for loads in cut]
    assert chosen == [[[0, 1, 2], [3]], [[5, 6, 7], [8, 9]]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_loads_of_other_ranks_are_merged_or_split(num_ranks: int) -> None:
    loads = np.random.default_rng(0).integers(0, 50, (2, 3, 4, 24))
    cut = list(batches(LoadTrace(loads), None, num_ranks))
    for index, batch in enumerate(cut):
        assert batch.shape == (3, num_ranks, 24)
        assert np.array_equal(batch.sum(1), loads[index].sum(1))
    if num_ranks == 2:
        assert np.array_equal(cut[0][:, 0], loads[0, :, :2].sum(1))
    if num_ranks == 8:
        assert np.ptp(cut[0].sum(2).reshape(3, 4, 2), axis=2).max() <= 1


IDS = np.zeros((6, 2, 2), np.uint8)
LENGTHS = np.array([6], np.int32)
WRAPS = np.array([1 << 62] * 4 + [6])  # their sum is 6 in 64 bits


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"topk_ids": IDS.astype(np.float32), "sequence_lengths": LENGTHS}, "must be integers"),
        ({"topk_ids": IDS[0], "sequence_lengths": LENGTHS}, "3 dimensions"),
        ({"topk_ids": np.uint8(3)}, "3 dimensions"),
        ({"topk_ids": IDS, "sequence_lengths": LENGTHS - 1}, "sum to 5"),
        ({"topk_ids": IDS, "sequence_lengths": np.array([6, -1])}, "has -1, must be 0 to 6"),
        ({"topk_ids": IDS, "sequence_lengths": WRAPS}, "must be 0 to 6"),
        ({"topk_ids": IDS, "sequence_lengths": np.full(2, (1 << 63) + 3, np.uint64)}, "0 to 6"),
        ({"topk_ids": IDS.astype("m8[s]"), "sequence_lengths": LENGTHS}, "must be integers"),
        ({"topk_ids": IDS.astype(np.int16) - 2, "sequence_lengths": LENGTHS}, "has -2"),
        ({"topk_ids": IDS + 9, "metadata": np.array('{"num_experts": 8}')}, "has 9"),
        ({"topk_ids": IDS, "metadata": np.array('{"num_experts": "8"}')}, "num_experts"),
        ({"topk_ids": IDS, "metadata": np.array(f'{{"num_experts": {10**12}}}')}, "1 to 65536"),
        ({"topk_ids": IDS, "metadata": np.array("{")}, "JSON"),
        ({"topk_ids": IDS, "metadata": np.array("[" * 100_000)}, "JSON"),
        ({"topk_ids": IDS, "metadata": np.array("[]")}, "JSON object"),
        ({"topk_ids": IDS, "metadata": np.zeros(3)}, "one string"),
        ({"topk_ids": IDS, "phase": np.zeros(5, np.uint8)}, "phase"),
        ({"topk_ids": IDS, "phase": np.full(6, 2)}, "phase"),
        ({"loads": np.zeros((2, 2), np.int32)}, "dimensions"),
        ({"loads": np.zeros((2, 2, 2))}, "integers"),
        ({"loads": np.full((2, 2, 2), -1)}, "0 to 2147483647"),
        ({"loads": np.full((2, 2, 2), 1 << 62)}, "0 to 2147483647"),
        ({"other": IDS}, "not a trace"),
        ({"topk_ids": np.array([{}], object)}, "Object arrays cannot be loaded"),
    ],
)
def test_bad_contents(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    path = write_npz(tmp_path / "t.npz", **arrays)
    with pytest.raises(TraceError, match=words):
        load_trace(path)


def test_ids_are_saved_in_as_few_bytes_as_hold_them(tmp_path: Path) -> None:
    for most, least, dtype in ((7, 0, "u1"), (300, 0, "u2"), (300, -1, "i4"), (40_000, -1, "i4")):
        ids = np.array([[[least, most]]])
        save_trace(tmp_path / "t.npz", Trace(ids, np.array([1]), most + 1))
        found = load_trace(tmp_path / "t.npz")
        assert isinstance(found, Trace)
        assert (found.topk_ids.tolist(), found.topk_ids.dtype) == (ids.tolist(), dtype)


def test_files_that_are_not_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(TraceError, match="does not exist"):
        load_trace(path)
    for content in (b"", b"PK\x03\x04 not really", b"\x93NUMPY", bytes(range(256)) * 40):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="cannot be read"):
            load_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "..")


@pytest.mark.parametrize("shape", ["(1000000000000, 26, 6)", "(-5, 2, 2)", "(10, 2, 2)"])
def test_a_header_that_lies_allocates_nothing(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"1234"
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("topk_ids.npy", member)
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "t.npz")


def test_a_phase_alone_keeps_its_tokens_and_their_sequences() -> None:
    ids = np.arange(12, dtype=np.uint8).reshape(6, 2, 1)
    trace = Trace(ids, np.array([1, 3, 2]), 12, np.array([0, 1, 0, 0, 1, 1], np.uint8))
    prefill = of_phase(trace, PREFILL)
    assert isinstance(prefill, Trace)
    assert prefill.topk_ids.tolist() == ids[[0, 2, 3]].tolist()
    assert prefill.sequence_lengths.tolist() == [1, 2]
    with pytest.raises(TraceError, match="prefill only"):
        of_phase(prefill, DECODE)
    loads = LoadTrace(np.ones((3, 1, 4), np.int32), np.array([1, 0, 1], np.uint8))
    assert of_phase(loads, DECODE).loads.shape == (2, 1, 4)
    assert of_phase(replace(loads, phase=None), DECODE).loads.shape == (3, 1, 4)
