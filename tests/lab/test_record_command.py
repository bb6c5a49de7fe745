"""`ultraep-serve record`, of ranks whose rings are written by a thread."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.support.ring_files import create, write
from ultraep_lab.errors import TraceError
from ultraep_lab.recorded_loads import LoadRecording
from ultraep_lab.store import load_trace
from ultraep_lab.trace import PREFILL, LoadTrace
from ultraep_serve.cli import main
from ultraep_serve.system.topology import Location, PipelineStage
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import ExpertShape, IntArray, Policy

RANKS, LAYERS, EXPERTS = 2, 3, 8
SHAPE = ExpertShape(RANKS, EXPERTS, 1)


def load_of(batch: int, layer: int, rank: int) -> IntArray:
    """(E,) another one for every record."""
    return np.arange(EXPERTS, dtype=np.int32) + 100 * batch + 10 * layer + 1000 * rank


def loads_of(batches: Sequence[int]) -> IntArray:
    """(batches, layers, R, E)"""
    return np.array(
        [
            [[load_of(batch, layer, rank) for rank in range(RANKS)] for layer in range(LAYERS)]
            for batch in batches
        ]
    )


@contextmanager
def rings(path: Path, mode: str = "data", **changes: int) -> Iterator[list[Recorder]]:
    made = [
        create(path, rank, SHAPE, num_layers=LAYERS, mode=mode, **changes) for rank in range(RANKS)
    ]
    yield made
    for ring in made:
        ring.close()


def record_layer(ring: Recorder, batch: int, layer: int, rank: int) -> None:
    loads = np.zeros(RANKS)
    own = load_of(batch, layer, rank)
    write(ring, batch, layer, load_before=loads, load_after=loads, own_load=own)


def record_batch(ranks: Sequence[Recorder], batch: int, first_layer: int = 0) -> None:
    for layer in range(first_layer, LAYERS):
        for rank, ring in enumerate(ranks):
            record_layer(ring, batch, layer, rank)


@contextmanager
def serving(ranks: Sequence[Recorder]) -> Iterator[None]:
    """Batches all the time."""
    stopping = threading.Event()

    def run() -> None:
        for batch in count():
            if stopping.wait(0.01):
                return
            record_batch(ranks, batch)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def record(path: Path, out: Path, *flags: str) -> int:
    return main(["record", "--run-dir", str(path), "--out", str(out), *flags])


@pytest.mark.parametrize("mode", ["tensor", "data"])
def test_loads_of_a_running_server(tmp_path: Path, run_path: Path, mode: str) -> None:
    out = tmp_path / "trace.npz"
    with rings(run_path, mode, ring_records=256) as ranks, serving(ranks):
        assert record(run_path, out, "--batches", "5") == 0
    trace = load_trace(out)
    assert isinstance(trace, LoadTrace)
    first = int(trace.loads.reshape(-1)[0]) // 100
    expected = loads_of(range(first, first + 5))
    assert np.array_equal(trace.loads, expected if mode == "data" else expected[:, :, 0])
    assert trace.phase is not None
    assert set(trace.phase.tolist()) == {PREFILL}
    about = trace.metadata
    assert (about["mode"], about["ranks"], about["layers"]) == (mode, RANKS, LAYERS)
    assert (about["batches"], about["missed_records"]) == (5, 0)
    assert main(["replay", str(out), "--ep", "2", "--policies", "off,quota"]) == 0


def test_a_batch_that_was_begun_before_is_left_out(run_path: Path) -> None:
    with rings(run_path) as ranks:
        record_batch(ranks, 6)
        record_layer(ranks[0], 7, 0, 0)
        with closing(LoadRecording(run_path)) as recording:
            record_layer(ranks[1], 7, 0, 1)
            record_batch(ranks, 7, first_layer=1)
            record_batch(ranks, 8)
            record_layer(ranks[0], 9, 0, 0)
            recording.poll()
            assert recording.num_batches == 1
            assert np.array_equal(recording.trace().loads, loads_of([8]))


def test_micro_batches_are_batches_of_their_own(run_path: Path) -> None:
    with rings(run_path) as ranks, closing(LoadRecording(run_path)) as recording:
        for layer in range(LAYERS):
            for number in (1, 2):  # as they come from a device
                for rank, ring in enumerate(ranks):
                    loads = np.zeros(RANKS)
                    own = load_of(number, layer, rank)
                    write(ring, 1, layer, load_before=loads, load_after=loads, own_load=own)
        recording.poll()
        assert np.array_equal(recording.trace().loads, loads_of([1, 2]))
        assert len(recording.trace(limit=1).loads) == 1


def test_gaps_are_counted_and_their_batches_left_out(run_path: Path) -> None:
    with rings(run_path, ring_records=8) as ranks, closing(LoadRecording(run_path)) as recording:
        for batch in range(4):
            record_batch(ranks, batch)
        write(ranks[1], 4, bytes_sent=-1)  # which cannot be
        ranks[1].set_policy(Policy.QUOTA)  # which publishes the count
        recording.poll()
        trace = recording.trace()
        assert np.array_equal(trace.loads, loads_of([2, 3]))
        assert trace.metadata["missed_records"] == 2 * 4 + 1


def test_what_was_recorded_until_a_server_ends_is_written(
    tmp_path: Path, run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.npz"
    with rings(run_path, ring_records=256) as ranks, serving(ranks):
        timer = threading.Timer(1.0, (run_path / "ring-1").unlink)
        timer.start()
        assert record(run_path, out) == 0
        timer.join()
    assert "ring-1 was deleted" in capsys.readouterr().out
    assert isinstance(load_trace(out), LoadTrace)


def without_batches(path: Path) -> None:
    for rank in range(RANKS):
        create(path, rank, SHAPE, mode="data").close()


def without_a_rank(path: Path) -> None:
    create(path, 0, SHAPE, Location(0, RANKS, 1, 1), mode="data").close()


def without_the_first_stage(path: Path) -> None:
    create(path, 0, SHAPE, pipeline=PipelineStage(1, 2), mode="data").close()


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (without_batches, "no whole batch was recorded"),
        (without_a_rank, r"ranks \[1\] are on other hosts"),
        (without_the_first_stage, "no rank of a first pipeline stage"),
    ],
)
def test_what_cannot_be_recorded_leaves_no_file(
    tmp_path: Path, run_path: Path, server: Callable[[Path], None], says: str
) -> None:
    server(run_path)
    with pytest.raises(TraceError, match=says), closing(LoadRecording(run_path)) as recording:
        recording.trace()
    assert record(run_path, tmp_path / "trace.npz", "--seconds", "0.1") == 2
    assert not list(tmp_path.iterdir())
