"""`ultraep-serve record` against a real sidecar and ranks that run in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.lab.test_record_spool import LAYERS, RANKS, Ranks, random_ids
from tests.support.bench_fakes import TOKEN, serving
from tests.support.ring_files import create
from ultraep_lab.bench.sidecar import CaptureSidecar
from ultraep_lab.store import load_trace
from ultraep_lab.trace import LoadTrace, Trace
from ultraep_serve.cli import main
from ultraep_serve.errors import BenchError
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.control import ControlPage, RecordLevel
from ultraep_serve.telemetry.schema import RingState
from ultraep_serve.types import ExpertShape, Policy

BEARER = {"Authorization": f"Bearer {TOKEN}"}
MIB = 1 << 20


@contextmanager
def engine(path: Path, *, shared: bool = False, tokens: int = 6) -> Iterator[None]:
    """Ranks that run batch after batch."""
    ranks, stopping = Ranks(path, shared=shared), threading.Event()
    mode = "tensor" if shared else "data"
    shape = ExpertShape(RANKS, 8, 1)
    rings = [create(path, rank, shape, num_layers=LAYERS, mode=mode) for rank in range(RANKS)]
    for ring in rings:
        ring.set_state(RingState.READY)

    def run() -> None:
        while not stopping.wait(0.002):
            ranks.batch(*(random_ids(tokens, rank) for rank in range(len(ranks.writers))))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        for ring in rings:
            ring.close()


def record(url: str, out: Path, *flags: str) -> int:
    return main(["record", "--sidecar", url, "--token", TOKEN, "--out", str(out), *flags])


@pytest.mark.parametrize("shared", [True, False], ids=["tensor", "data"])
def test_tokens_of_a_running_server(tmp_path: Path, run_path: Path, shared: bool) -> None:
    with (
        engine(run_path, shared=shared),
        serving(create_app(run_path, TOKEN, False)) as url,
    ):
        assert record(url, tmp_path / "trace.npz", "--batches", "5") == 0
    trace = load_trace(tmp_path / "trace.npz")
    assert isinstance(trace, Trace)
    ranks = 1 if shared else RANKS
    expected = np.concatenate([random_ids(6, rank) for rank in range(ranks)])
    assert np.array_equal(trace.topk_ids, np.tile(expected, (5, 1, 1)))
    assert trace.metadata["mode"] == ("tensor" if shared else "data")
    assert not list(run_path.glob("spool-*"))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.npz"]


def test_loads_as_a_table_until_the_time_is_up(tmp_path: Path, run_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with engine(run_path), serving(create_app(run_path, TOKEN, False)) as url:
        out = tmp_path / "trace.parquet"
        assert record(url, out, "--level", "loads", "--seconds", "0.3") == 0
    trace = load_trace(out)
    assert isinstance(trace, LoadTrace)
    assert trace.loads.shape[1:] == (LAYERS, RANKS, 8)


def test_what_does_not_fit_ends_the_recording(
    tmp_path: Path, run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        engine(run_path, shared=True, tokens=20_000),
        serving(create_app(run_path, TOKEN, False)) as url,
    ):
        assert record(url, tmp_path / "trace.npz", "--max-mib", "1") == 0
    assert "did not fit" in capsys.readouterr().out
    assert load_trace(tmp_path / "trace.npz").metadata["batches"] == 4


def test_an_idle_server_leaves_no_file(
    tmp_path: Path, run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(run_path, tokens=0), serving(create_app(run_path, TOKEN, False)) as url:
        assert record(url, tmp_path / "trace.npz", "--seconds", "0.1") == 2
    assert "no whole batch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--out", "trace.parquet"), "must end in .npz"),
        (("--out", "trace.txt", "--level", "loads"), ".npz or .parquet"),
        (("--out", "/dev/null/trace.npz"), "cannot be written"),
        (("--out", "trace.npz", "--batches", "0"), "1 or more"),
        (("--out", "trace.npz", "--seconds", "nan"), "more than 0"),
        (("--out", "trace.npz", "--max-mib", "0"), "1 to 4096"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", "--sidecar", "http://127.0.0.1:9", "--token", "x", *flags]) == 2
    assert says in capsys.readouterr().err


def test_only_bearers_of_the_token_record(tmp_path: Path) -> None:
    client = TestClient(create_app(tmp_path, TOKEN, False))
    body = {"level": "tokens"}
    assert client.post("/v1/control/record", json=body, headers=BEARER).status_code == 409
    page = ControlPage.create(tmp_path, Policy.OFF)
    for method, path in (
        ("POST", "/v1/control/record"),
        ("GET", "/v1/record"),
        ("GET", "/v1/record/spool/0"),
        ("DELETE", "/v1/record"),
    ):
        assert client.request(method, path).status_code == 401
    assert page.recording_word == 0
    for wrong in ({"level": "all"}, {"level": "loads", "max_bytes": 5}, {}):
        assert client.post("/v1/control/record", json=wrong, headers=BEARER).status_code == 422
    answer = client.post("/v1/control/record", json=body, headers=BEARER)
    assert answer.json() == {"level": "tokens", "number": 1, "schema_version": 2}
    assert page.recording_word & 0xFF == RecordLevel.TOKENS
    assert client.get("/v1/record/spool/0", headers=BEARER).status_code == 404
    assert client.get("/v1/record/spool/-1", headers=BEARER).status_code == 422
    page.close()


def test_links_and_strange_files_are_not_handed_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "spool-0").symlink_to(tmp_path / "secret")
    (tmp_path / "spool-1").write_text("not a spool")
    client = TestClient(create_app(tmp_path, TOKEN, False))
    assert client.get("/v1/record", headers=BEARER).json()["spools"] == []
    assert client.get("/v1/record/spool/0", headers=BEARER).status_code == 404


def test_a_recording_replaced_by_another_says_so(run_path: Path) -> None:
    with engine(run_path), serving(create_app(run_path, TOKEN, False)) as url:
        ours, theirs = CaptureSidecar(url, TOKEN), CaptureSidecar(url, TOKEN)
        number = ours.start("tokens", MIB)
        later = theirs.start("loads", MIB)
        while not theirs.progress(later).batches:
            pass
        with pytest.raises(BenchError, match="another recording"):
            ours.progress(number)
        theirs.stop()
        ours.close()
        theirs.close()
