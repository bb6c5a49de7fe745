"""What ranks spool while somebody records, and the traces made of it."""

import os
from pathlib import Path

import numpy as np
import pytest

from ultraep_lab.captured import assemble
from ultraep_lab.trace import DECODE, PREFILL, LoadTrace, Trace
from ultraep_serve.errors import SpoolError, TraceError
from ultraep_serve.telemetry.control import ControlPage, Recording, RecordLevel
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.spool import (
    CHUNK,
    PAGE_BYTES,
    SpoolSource,
    SpoolWriter,
    parse_spool_header,
)
from ultraep_serve.types import Policy

MIB = 1 << 20
RANKS, LAYERS, EXPERTS, TOP_K = 2, 3, 8, 2


class Ranks:
    """The writers of a run; every token chooses by rank and layer, so that mix-ups show."""

    def __init__(self, path: Path, *, shared: bool = False, experts: int = EXPERTS) -> None:
        self.path = path
        self.page = ControlPage.create(path, Policy.OFF)
        self.writers = [
            SpoolWriter(path, SpoolSource(rank, RANKS, LAYERS, experts, 8, shared, "vllm"))
            for rank in range(1 if shared else RANKS)
        ]

    def batch(self, *ids_by_rank: np.ndarray, layers: int = LAYERS) -> None:
        """``ids_by_rank`` (T, LAYERS, K) each."""
        tokens = sum(len(ids) for ids in ids_by_rank)
        for writer, ids in zip(self.writers, ids_by_rank, strict=True):
            writer.begin(self.page.recording_word, tokens)
            for layer in range(layers):
                if writer.is_recording:
                    writer.add(layer, ids[:, layer])

    def spools(self) -> list[bytes]:
        ranks = [writer._source.rank for writer in self.writers]
        return [RunFiles(self.path).spool(rank).read_bytes() for rank in ranks]


def random_ids(tokens: int, seed: int = 0, experts: int = EXPERTS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, experts, (tokens, LAYERS, TOP_K), np.int32)


def token_trace(spools: list[bytes], limit: int | None = None) -> Trace:
    trace = assemble(spools, limit)
    assert isinstance(trace, Trace)
    return trace


def test_a_recording_is_one_word() -> None:
    recording = Recording((1 << 32) - 1, RecordLevel.TOKENS, ((1 << 24) - 1) * MIB)
    assert Recording.from_word(recording.word) == recording
    assert recording.word < 1 << 64
    assert Recording.from_word(0x77).level is RecordLevel.OFF


def test_nothing_is_there_until_somebody_records(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.batch(random_ids(4), random_ids(4))
    assert not any(RunFiles(tmp_path).spool(rank).exists() for rank in range(RANKS))


def test_tokens_come_back_rank_by_rank_and_layer_by_layer(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    first, second, third = random_ids(6), random_ids(3, 1), random_ids(2, 2)
    ranks.page.record(RecordLevel.TOKENS, MIB)
    ranks.batch(first, second)
    ranks.batch(third, third[:0])  # rank 1 keeps step with a batch of no requests
    ranks.page.record(RecordLevel.OFF)
    ranks.batch(first, second)
    trace = token_trace(ranks.spools())
    assert np.array_equal(trace.topk_ids, np.concatenate([first, second, third]))
    assert trace.topk_ids.dtype == np.uint8
    assert trace.sequence_lengths.tolist() == [9, 2]
    assert trace.phase is not None
    assert trace.phase.tolist() == [PREFILL] * 9 + [DECODE] * 2
    assert trace.num_experts == EXPERTS
    assert trace.metadata["mode"] == "data"
    assert trace.metadata["lost_batches"] == 0
    assert token_trace(ranks.spools(), limit=1).num_tokens == 9
    assert RunFiles(tmp_path).spool(0).stat().st_mode & 0o777 == 0o600


def test_loads_are_the_counts_of_the_tokens(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    first, second = random_ids(6), random_ids(3, 1)
    first[2] = -1  # padding
    ranks.page.record(RecordLevel.LOADS, MIB)
    ranks.batch(first, second)
    trace = assemble(ranks.spools())
    assert isinstance(trace, LoadTrace)
    for layer in range(LAYERS):
        for rank, ids in enumerate((first[:, layer], second[:, layer])):
            counts = np.bincount(ids[ids >= 0], minlength=EXPERTS)
            assert trace.loads[0, layer, rank].tolist() == counts.tolist()


def test_where_all_see_the_same_tokens_one_rank_is_enough(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, shared=True)
    ranks.page.record(RecordLevel.LOADS, MIB)
    ranks.batch(random_ids(9))
    trace = assemble(ranks.spools())
    assert isinstance(trace, LoadTrace)
    assert trace.loads.shape == (1, LAYERS, EXPERTS)
    assert trace.loads.sum() == 9 * LAYERS * TOP_K


def test_padding_and_impossible_ids_are_no_choices(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, shared=True)
    ids = random_ids(10)
    ids[4:6] = -1
    ids[7, 1, 0] = 1 << 20
    ids[8, 2, 1] = -9
    ranks.page.record(RecordLevel.TOKENS, MIB)
    ranks.batch(np.full_like(ids, -1))
    ranks.batch(ids)
    trace = token_trace(ranks.spools())
    expected = np.where((ids < 0) | (ids >= EXPERTS), -1, ids)
    assert np.array_equal(trace.topk_ids, np.delete(expected, [4, 5], axis=0))
    assert trace.sequence_lengths.tolist() == [8]


def test_many_experts_keep_their_ids(tmp_path: Path) -> None:
    for experts in (300, 1 << 15, 40_000):
        ranks = Ranks(tmp_path, shared=True, experts=experts)
        ids = np.array([[[0, experts - 1]] * LAYERS], np.int32)
        ranks.page.record(RecordLevel.TOKENS, MIB)
        ranks.batch(ids)
        assert np.array_equal(token_trace(ranks.spools()).topk_ids, ids)


def test_a_full_spool_keeps_whole_batches_and_counts_the_rest(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, shared=True)
    ids = random_ids(20_000)  # 240 kB
    ranks.page.record(RecordLevel.TOKENS, MIB)
    for _ in range(6):
        ranks.batch(ids)
    (spool,) = ranks.spools()
    header = parse_spool_header(spool)
    assert (header.batches, header.lost_batches, header.is_open) == (4, 2, False)
    assert len(spool) <= MIB
    trace = token_trace([spool])
    assert trace.num_tokens == 4 * len(ids)
    assert trace.metadata["lost_batches"] == 2


def test_a_refused_write_loses_the_batch_and_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, shared=True)
    ranks.page.record(RecordLevel.TOKENS, MIB)
    ranks.batch(random_ids(5))
    whole = ranks.spools()

    def head_only(descriptor: int, content: bytes, offset: int) -> int:
        return write(descriptor, content[: CHUNK.size], offset)

    write = os.pwrite
    monkeypatch.setattr("os.pwrite", head_only)
    ranks.batch(random_ids(5))
    assert [spool[PAGE_BYTES:] for spool in ranks.spools()] == [w[PAGE_BYTES:] for w in whole]
    assert parse_spool_header(ranks.spools()[0]).lost_batches == 1


def test_recording_starts_anew_each_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, shared=True)
    numbers = []
    for tokens in (5, 3):
        numbers.append(ranks.page.record(RecordLevel.TOKENS, MIB).number)
        ranks.batch(random_ids(tokens))
        assert token_trace(ranks.spools()).num_tokens == tokens
        assert parse_spool_header(ranks.spools()[0]).number == numbers[-1]
        ranks.page.record(RecordLevel.OFF)
        ranks.batch(random_ids(7))
    assert numbers == [1, 2]
    with pytest.raises(ValueError, match="must be"):
        ranks.page.record(RecordLevel.LOADS, MIB - 1)


def test_a_batch_that_some_rank_did_not_finish_is_left_out(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ids = random_ids(4)
    ranks.writers[0].begin(ranks.page.record(RecordLevel.TOKENS, MIB).word, 8)  # one rank only
    for layer in range(LAYERS):
        ranks.writers[0].add(layer, ids[:, layer])
    ranks.writers[1].begin(0, 8)
    ranks.batch(ids[:3], ids[:2])
    ranks.batch(ids, ids, layers=LAYERS - 1)
    assert parse_spool_header(ranks.spools()[0]).is_open
    assert token_trace(ranks.spools()).sequence_lengths.tolist() == [5]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.page.record(RecordLevel.TOKENS, MIB)
    ranks.batch(random_ids(0), random_ids(0))
    zero, one = ranks.spools()
    for spools, text in (
        ([], "no rank has recorded"),
        ([zero], r"ranks \[0\], expected \[0, 1\]"),
        ([zero, zero], "expected"),
        ([zero, one], "no whole batch"),
    ):
        with pytest.raises(TraceError, match=text):
            assemble(spools)
    ranks.page.record(RecordLevel.LOADS, MIB)
    ranks.batch(random_ids(1), random_ids(1))
    with pytest.raises(TraceError, match="do not belong together"):
        assemble([zero, ranks.spools()[1]])


def test_damaged_spools_are_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, shared=True)
    ranks.page.record(RecordLevel.TOKENS, MIB)
    ranks.batch(random_ids(5))
    (spool,) = ranks.spools()
    for header in (b"", b"x" * PAGE_BYTES, spool[:50]):
        with pytest.raises(SpoolError):
            assemble([header])
    with pytest.raises(TraceError, match="damaged"):
        assemble([spool[:PAGE_BYTES] + b"x" * CHUNK.size + spool[PAGE_BYTES + CHUNK.size :]])
    with pytest.raises(TraceError, match="no whole batch"):
        assemble([spool[:-1]])


@pytest.mark.parametrize("level", [RecordLevel.TOKENS, RecordLevel.LOADS])
def test_ids_in_any_order_of_memory_are_recorded(tmp_path: Path, level: RecordLevel) -> None:
    spools = []
    for order in ("C", "F"):
        (tmp_path / order).mkdir()
        ranks = Ranks(tmp_path / order, shared=True)
        ranks.page.record(level, MIB)
        ranks.batch(np.asarray(random_ids(5), order=order))
        spools += ranks.spools()
    assert spools[0] == spools[1]
