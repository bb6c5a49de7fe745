"""`ultraep-serve status` and ``status``: the sidecar's figures without a sidecar."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import ultraep_serve
from tests.support.bench_fakes import serving
from tests.support.rings import SyntheticRun
from ultraep_serve.cli import main
from ultraep_serve.cli import status as command
from ultraep_serve.errors import ConfigError, NoServerError
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.sidecar.status import status
from ultraep_serve.telemetry import run_directory
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_directory import RunDirectory, name_of_run
from ultraep_serve.types import ExpertShape

ROOT = Path(ultraep_serve.__file__).parents[1]
TWO_RANKS = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", path)
    return path


def without_ages(text: str) -> str:
    """``text`` as it was, but for what changes with time."""
    balance = json.loads(text)
    for rank in balance["ranks"]:
        rank["heartbeat_age_seconds"] = rank["last_batch_age_seconds"] = 0.0
    return json.dumps(balance, separators=(",", ":"))


def test_json_is_what_the_sidecar_answers(
    tmp_path: Path,
    planned_run: SyntheticRun,
    client: TestClient,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(3):
        planned_run.batch()
    assert main(["status", "--json", "--run-dir", str(tmp_path)]) == 0
    answer = without_ages(client.get("/v1/balance").text)
    assert without_ages(capsys.readouterr().out) == answer
    assert json.loads(without_ages(json.dumps(status(run_dir=tmp_path)))) == (json.loads(answer))


def test_a_table_for_people(
    tmp_path: Path, planned_run: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["status", "--run-dir", str(tmp_path)]
    assert main(words) == 0
    assert "no prefill batch yet" in capsys.readouterr().out
    planned_run.batch()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "✔ ready" in shown
    assert "vllm, data parallel, 4 ranks, policy quota" in shown
    assert "1 planned, 2 small" in shown
    before = status(run_dir=tmp_path)["imbalance"]["before"]["mean"]
    assert f"{before:.2f} -> " in shown
    assert shown.count("█") > 4
    assert "summed over layers" in shown
    planned_run.recorders[2].set_state(RingState.FAILED)
    assert main(words) == 1
    assert "✘ not ready: rank 2: state is failed" in capsys.readouterr().out


def test_the_server_that_runs_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "ultraep-serve vllm MODEL" in printed.err
    with pytest.raises(NoServerError, match="start one"):
        status()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        directory = RunDirectory.create(name_of_run(os.getpid(), 0))
        for words in (["status"], ["status", "--port", str(port)]):
            assert main(words) == 1
            assert "not ready: no ring can be read" in " ".join(capsys.readouterr().out.split())
        with pytest.raises(NoServerError, match="no ring can be read"):
            status()
        run = SyntheticRun(directory.path, TWO_RANKS, 2)
        run.batch()
        assert main(["status"]) == 0
        other = RunDirectory.create(name_of_run(1, 0))
        assert main(["status"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 3
        assert status(port=port)["num_ranks"] == 2
    run.close()
    other.leave()
    directory.leave()


def test_watching_ends_with_ctrl_c(
    tmp_path: Path,
    planned_run: SyntheticRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    naps = iter([False, False, True] * 2)

    def sleep(_: float) -> None:
        planned_run.batch()
        if next(naps):
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert main(["status", "--watch", "--json", "--run-dir", str(tmp_path)]) == 0
    planned = [json.loads(line)["batches"]["planned"] for line in capsys.readouterr().out.split()]
    assert planned == [0, 1, 2]
    assert main(["status", "--watch", "--run-dir", str(tmp_path)]) == 0
    assert "✔ ready" in capsys.readouterr().out


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The address of a sidecar."""
    with serving(create_app(tmp_path, None)) as url:
        yield url


def test_a_sidecar_elsewhere(
    tmp_path: Path, remote: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--url", remote]) == 1
    assert "no ring can be read" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(NoServerError, match="no ring can be read"):
        status(url=remote)
    run = SyntheticRun(tmp_path, TWO_RANKS, 2)
    run.batch()
    assert main(["status", "--url", remote]) == 0
    assert remote in capsys.readouterr().out
    assert main(["status", "--json", "--url", f"{remote}/"]) == 0
    here, there = status(run_dir=tmp_path), capsys.readouterr().out
    assert without_ages(there) == without_ages(json.dumps(here))
    run.close()


def test_a_terminal_obeys_nothing_of_a_sidecar_elsewhere(
    tmp_path: Path, planned_run: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    obeyed = "\x1b]0;title\x07\x9b2J\u202e"
    reasons = {"ready": False, "status": "not ready", "reasons": {"0": f"failed{obeyed}"}}
    balance = {**status(run_dir=tmp_path), "engine": obeyed, **reasons}
    other = FastAPI()
    other.get("/v1/balance")(lambda: balance)
    with serving(other) as url:
        for words in (["status"], ["status", "--json"]):
            assert main([*words, "--url", url]) == 1
            shown = capsys.readouterr().out
            assert not set(obeyed) - set("]0;title2J") & set(shown)
            assert "]0;title" in shown
    assert main(["status", "--run-dir", f"{tmp_path}/{obeyed}"]) == 2
    assert not set("\x1b\x9b\x07") & set(capsys.readouterr().err)


def test_an_address_without_a_sidecar(capsys: pytest.CaptureFixture[str]) -> None:
    other = FastAPI()
    other.get("/{path:path}")(lambda: {"status": "ok"})
    with serving(other) as url:
        assert main(["status", "--url", url]) == 2
    assert "is this the address of a sidecar" in capsys.readouterr().err
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 2
    assert "--url" in capsys.readouterr().err
    with pytest.raises(NoServerError, match="cannot be reached"):
        status(url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        status(url="nowhere")


def test_it_needs_numpy_and_rich_only(tmp_path: Path, planned_run: SyntheticRun) -> None:
    code = (
        "import sys, ultraep_serve\n"
        "assert not {'numpy', 'pydantic'} & set(sys.modules)\n"
        "from ultraep_serve.cli import main\n"
        "main(['status', '--run-dir', sys.argv[1]])\n"
        "unwanted = {'fastapi', 'uvicorn', 'prometheus_client', 'httpx', 'torch', 'numba'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
