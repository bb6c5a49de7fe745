"""Readiness and its log: before the engine, with it, when ranks fail, end or start again."""

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.ring_files import create, put
from tests.support.rings import SyntheticRun, planned_run
from tests.support.sidecar_runs import TOKEN, SkewedRun, reasons, samples
from ultraep_serve.sidecar.app import AppOptions, StateLog, create_app
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy


def test_before_the_engine_only_health_is_well(client: TestClient) -> None:
    assert client.get("/healthz").status_code == 200
    assert client.get("/").status_code == 200
    assert client.get("/metrics").status_code == 200
    assert client.get("/v1/config").json()["config"] is None
    assert "run" in reasons(client)
    for path in ("/v1/balance", "/v1/balance/batches", "/v1/balance/layers/0"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "engine" in answer.json()["detail"]


def test_ready_only_when_every_rank_is(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    assert reasons(client) == {}
    skewed_run.recorders[1].set_state(RingState.FAILED)
    assert reasons(client) == {"1": "state is failed"}
    skewed_run.recorders[1].close()
    RunFiles(tmp_path).ring(1).unlink()
    assert "ring-1 was deleted" in reasons(client)["1"]
    assert client.get("/v1/balance").json()["ranks"][1]["state"] == "missing"


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
    assert balance["batches"]["planned"] == 1
    assert balance["batches"]["skipped"]["small"] == 0
    second.close()


def test_hostile_files_are_reported_and_survived(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    skewed_run.batch(0)
    put(RunFiles(tmp_path).ring(0), b"UEPRING\x01" + bytes(range(256)) * 40)
    os.mkfifo(tmp_path / "ring-7")
    (tmp_path / "ring-08").mkdir()
    (tmp_path / "ring-x").write_text("x")
    (tmp_path / "control").write_bytes(b"\xff" * 8192)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "schema version" in reasons(client)["0"]
    balance = client.get("/v1/balance").json()  # rank 1 is the primary one
    assert (balance["window_records"], balance["ranks"][0]["state"]) == (2, "missing")
    assert client.get("/v1/config").json()["config"] is None
    assert client.get("/metrics").status_code == 200
    put(RunFiles(tmp_path).ring(1), b"")
    assert set(reasons(client)) == {"0", "1", "7"}


def test_its_directory_may_go_and_come_before_the_engine(tmp_path: Path) -> None:
    run_path = tmp_path / "run"
    with TestClient(create_app(run_path, TOKEN, options=FAST)) as client:
        for _ in range(2):
            run_path.mkdir(mode=0o700)
            wait_for(client, "run")
            run_path.rmdir()
            assert client.get("/healthz").status_code == 200
        run_path.mkdir(mode=0o700)
        run = SkewedRun(run_path)
        wait_for(client, "{}")
        run.close()
        wait_for(client, "state is stopped")
        for rank in (0, 1):  # damaged after the last batch
            put(RunFiles(run_path).ring(rank), b"UEPRING\x01" + bytes(range(256)) * 40)
        wait_for(client, "schema version")
        assert client.get("/v1/balance").status_code == 503


FAST = AppOptions(poll_seconds=0.05, heartbeat_limit_seconds=1.5)


def beat(run_path: Path, rank: int) -> None:
    create(run_path, rank, ExpertShape(1, 4, 1), num_layers=2).set_state(RingState.READY)
    time.sleep(600)


def wait_for(client: TestClient, text: str) -> None:
    while text not in str(reasons(client)):
        time.sleep(0.05)


def test_a_killed_writer_is_noticed(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=beat, args=(tmp_path, 0))
    ControlPage.create(tmp_path, Policy.QUOTA).close()
    with TestClient(create_app(tmp_path, TOKEN, options=FAST)) as client:
        writer.start()
        try:
            wait_for(client, "{}")
        finally:
            writer.kill()
            writer.join()
        wait_for(client, "has died")
        assert client.get("/v1/balance").json()["ranks"][0]["alive"] is False
        assert samples(client)["ultraep_rank_up,rank=0"] == 0


def test_the_background_keeps_what_the_ring_forgets(tmp_path: Path) -> None:
    skewed_run = SkewedRun(tmp_path, ring_records=16)
    options = AppOptions(poll_seconds=0.001, max_rows=20)
    client = TestClient(create_app(tmp_path, TOKEN, options=options))
    for number in range(30):  # 60 records through a ring of 16 and a window of 20
        skewed_run.batch(number)
        client.get("/readyz")
    assert client.get("/v1/balance").json()["window_records"] == 20
    assert client.get("/v1/balance").json()["batches"]["planned"] == 30
    found = samples(client)
    assert found["ultraep_records_missed_total,rank=0"] == 0
    assert found["ultraep_imbalance_ratio_count,phase=prefill,when=before"] == 60
    skewed_run.close()


def test_health_of_every_rank(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    assert client.get("/v1/balance").json()["ranks"][0]["last_batch_age_seconds"] is None
    planned_run.batch()
    planned_run.recorders[1].set_state(RingState.FAILED)
    planned_run.recorders[2].close()
    RunFiles(tmp_path).ring(2).unlink()
    assert set(reasons(client)) == {"1", "2"}
    balance = client.get("/v1/balance").json()
    assert [rank["state"] for rank in balance["ranks"]] == ["ready", "failed", "missing", "ready"]
    assert [rank["alive"] for rank in balance["ranks"]] == [True, False, False, True]
    assert 0 <= balance["ranks"][0]["last_batch_age_seconds"] < 60


def test_one_line_per_change_of_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RunStore(tmp_path)
    log = StateLog()

    def lines() -> list[str]:
        caplog.clear()
        log.update(store.poll())
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO):
        assert len(lines()) == 1
        run = planned_run(tmp_path)
        assert lines() == ["every rank is ready", "policy is quota"]
        run.batch()
        assert lines() == []
        run.recorders[1].set_state(RingState.FAILED)
        assert lines() == ["not ready: 1: state is failed"]
        assert lines() == []
        run.control.set_policy(Policy.OFF)
        run.recorders[1].set_state(RingState.READY)
        assert lines() == ["every rank is ready", "policy is off"]
        run.close()
