"""Readiness and its log: before the engine, with it, without balancing, when ranks fail or end."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.support.ring_files import create
from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import SkewedRun, reasons, samples
from tests.support.waiting import until
from ultraep_serve.cli import main
from ultraep_serve.sidecar import app, routes
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.sidecar.status import status
from ultraep_serve.sidecar.store import Run, RunStore
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy

CLIENTS = 60  # more than there are threads
UNBALANCED = "layer 3 has an expert tensor that cannot be moved"


def test_before_the_engine_only_health_is_well(client: TestClient) -> None:
    for path in ("/healthz", "/", "/metrics", "/v1/config"):
        assert client.get(path).status_code == 200
    assert "run" in reasons(client)
    for path in ("/v1/balance", "/v1/balance/batches", "/v1/balance/layers/0"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "engine" in answer.json()["detail"]


def test_ready_only_when_every_rank_is(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    assert reasons(client) == {}
    assert client.get("/v1/balance").json()["ranks"][0]["last_batch_age_seconds"] is None
    planned_run.batch()
    planned_run.recorders[1].set_state(RingState.FAILED)
    planned_run.recorders[2].close()
    RunFiles(tmp_path).ring(2).unlink()
    found = reasons(client)
    assert (found["1"], set(found)) == ("state is failed", {"1", "2"})
    assert "ring-2 was deleted" in found["2"]
    ranks = client.get("/v1/balance").json()["ranks"]
    assert [rank["state"] for rank in ranks] == ["ready", "failed", "missing", "ready"]
    assert [rank["alive"] for rank in ranks] == [True, False, False, True]
    assert (ranks[0]["pid"], ranks[0]["lost"], ranks[0]["missed"]) == (os.getpid(), 0, 0)
    assert 0 <= ranks[0]["last_batch_age_seconds"] < 60


def test_an_engine_that_comes_back_is_followed(tmp_path: Path, client: TestClient) -> None:
    first = SkewedRun(tmp_path)
    first.batch(0)
    first.batch(1)
    first.skip(Decision.SMALL)
    assert client.get("/v1/balance").json()["window_records"] == 4
    first.close()
    assert reasons(client) == {"0": "state is stopped", "1": "state is stopped"}
    for rank in (0, 1):
        RunFiles(tmp_path).ring(rank).unlink()
    assert client.get("/v1/balance").status_code == 503
    second = SkewedRun(tmp_path, num_ranks=3)
    second.batch(0)
    assert reasons(client) == {}
    balance = client.get("/v1/balance").json()
    assert (balance["num_ranks"], balance["window_records"]) == (3, 2)
    assert balance["imbalance"]["before"]["max"] == 3.0
    assert (balance["batches"]["planned"], balance["batches"]["skipped"]["small"]) == (1, 0)
    second.close()


def test_a_killed_writer_is_noticed(tmp_path: Path, client: TestClient) -> None:
    ControlPage.create(tmp_path, Policy.QUOTA).close()
    writer = os.fork()
    if not writer:
        create(tmp_path, 0, ExpertShape(1, 4, 1), num_layers=2).set_state(RingState.READY)
        signal.pause()
    until(lambda: reasons(client) == {})
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert "has died" in reasons(client)["0"]
    assert client.get("/v1/balance").json()["ranks"][0]["alive"] is False
    assert samples(client)["ultraep_rank_up,rank=0"] == 0


def test_a_window_keeps_what_the_ring_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    skewed_run = SkewedRun(tmp_path, ring_records=16)
    for number in range(30):  # 60 records through a ring of 16
        skewed_run.batch(number)
        client.get("/readyz")
    balance = client.get("/v1/balance").json()
    assert (balance["window_records"], balance["batches"]["planned"]) == (60, 30)
    found = samples(client)
    assert found["ultraep_records_missed_total,rank=0"] == 0
    assert found["ultraep_imbalance_ratio_count,phase=prefill,when=before"] == 60
    skewed_run.close()


def test_a_server_that_runs_unbalanced_says_so_everywhere(
    tmp_path: Path,
    planned_run: SyntheticRun,
    client: TestClient,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where ranks have left rings before they gave up."""
    planned_run.batch()
    assert client.get("/readyz").json()["status"] == "ready"
    assert samples(client)["ultraep_unbalanced"] == 0
    (tmp_path / "unbalanced").write_text(f"{UNBALANCED}\n")
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "unbalanced")
    assert UNBALANCED in ready.json()["reasons"]["run"]
    balance = client.get("/v1/balance")
    assert balance.status_code == 503
    assert balance.json() == {**ready.json(), "detail": ready.json()["reasons"]["run"]}
    assert samples(client) == {"ultraep_unbalanced": 1}
    assert client.get("/v1/config").status_code == 200
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    assert UNBALANCED in " ".join(capsys.readouterr().out.split())
    assert status(run_dir=tmp_path)["status"] == "unbalanced"
    for content in (b"", b"\xff\xfe\n\n", b"a" * 100_000):
        (tmp_path / "unbalanced").write_bytes(content)
        assert 0 < len(client.get("/v1/balance").json()["detail"]) < 10_000


def test_probes_are_answered_whatever_others_ask(
    tmp_path: Path, planned_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_run.batch()
    may_end, real = threading.Event(), routes.batch_list

    def slow(*arguments: Any) -> Any:
        may_end.wait(60)
        return real(*arguments)

    monkeypatch.setattr(routes, "batch_list", slow)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(tmp_path, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            path = "/v1/balance/batches"
            others = [asyncio.create_task(client.get(path)) for _ in range(CLIENTS)]
            async with asyncio.timeout(60):
                health = [await client.get(path) for path in ("/healthz", "/readyz")]
            assert [answer.status_code for answer in health] == [200, 200]
            may_end.set()
            return await asyncio.gather(*others)

    assert {answer.status_code for answer in asyncio.run(ask())} == {200}


def fail(*_: Any, **__: Any) -> Run:
    raise OSError(24, "Too many open files")


def test_the_thread_that_polls_survives_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, thrice = [0], threading.Event()

    def poll(_: RunStore) -> Run:
        calls[0] += 1
        if calls[0] == 3:
            thrice.set()
        return fail()

    monkeypatch.setattr(RunStore, "poll", poll)
    monkeypatch.setattr(app, "_POLL_SECONDS", 0.001)
    with TestClient(create_app(tmp_path, None)) as client:
        assert thrice.wait(60)
        assert client.get("/healthz").status_code == 200
    assert sum("Too many open files" in record.getMessage() for record in caplog.records) == 1
