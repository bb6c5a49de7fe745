"""Answers over a made-up run: plans of batches, figures over time, health, pause, events, logs."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from ultraep_serve.observability import RingState, ring_path
from ultraep_serve.sidecar import create_app
from ultraep_serve.sidecar.answers import Answers
from ultraep_serve.sidecar.app import SidecarSettings
from ultraep_serve.sidecar.health import RankList
from ultraep_serve.sidecar.logs import StateLog, set_up_logging
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.testing.rings import SyntheticRun, Traffic
from ultraep_serve.types import ExpertShape, Policy

TOKEN = "open-sesame"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SHAPE = ExpertShape(num_ranks=4, num_logical_experts=32, num_replica_slots=2)
LAYERS = 3


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyntheticRun]:
    made = SyntheticRun(tmp_path, SHAPE, LAYERS, Traffic(balanced_share=0.0, decode_batches=2))
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(tmp_path, TOKEN, False))


def test_a_batch_is_explained_down_to_the_expert(run: SyntheticRun, client: TestClient) -> None:
    run.batch()
    detail = client.get("/v1/balance/batches/1").json()
    assert [layer["layer"] for layer in detail["layers"]] == [0, 1, 2]
    summed = sum(layer["bytes_moved"] for layer in detail["layers"])
    assert detail["summary"]["bytes_moved"] == summed > 0
    plan = client.get("/v1/balance/batches/1/layers/2").json()
    assert (plan["summary"]["decision"], plan["summary"]["reason"]) == ("planned", "imbalanced")
    after = np.array(plan["expert_assignments"])
    assert after.sum() == sum(rank["before"] for rank in plan["ranks"])
    by_master = after.reshape(4, 8).sum(axis=1)
    assert by_master.tolist() == [rank["before"] for rank in plan["ranks"]]
    held = np.zeros(4, int)
    for replica in plan["replicas"]:
        assert replica["home_rank"] == replica["expert"] // 8 != replica["rank"]
        after[replica["expert"]] -= replica["assignments"]
        held[replica["rank"]] += replica["assignments"]
    computed = after.reshape(4, 8).sum(axis=1) + held
    assert computed.tolist() == [rank["after"] for rank in plan["ranks"]]
    assert len(plan["replicas"]) == plan["summary"]["replicas"]
    moved = sum(replica["bytes"] for replica in plan["replicas"])
    assert moved == plan["summary"]["bytes_moved"]
    slowest = max(times["plan"] for times in plan["verb_seconds"])
    assert plan["summary"]["verb_seconds"]["plan"] == slowest
    for missing in ("2", "1/layers/3"):
        assert client.get(f"/v1/balance/batches/{missing}").status_code == 404


def test_batches_come_in_pages(run: SyntheticRun, client: TestClient) -> None:
    for _ in range(5):
        run.batch()
    seen, before = [], None
    for _ in range(3):
        parameters = {"limit": 2} | ({"before": before} if before is not None else {})
        page = client.get("/v1/balance/batches", params=parameters).json()
        seen += [batch["batch"] for batch in page["batches"]]
        before = page["next_before"]
    assert seen == [5, 4, 3, 2, 1]
    assert before is None


def test_phases_savings_and_floor(run: SyntheticRun, client: TestClient) -> None:
    run.batch()
    balance = client.get("/v1/balance").json()
    assert balance["phases"]["prefill"]["batches"] == 1
    assert balance["phases"]["decode"] == {"batches": 2, "imbalance": None}
    assert balance["phases"]["prefill"]["imbalance"] == balance["imbalance"]
    assert balance["floor"] == 1.0
    savings = balance["savings"]
    assert savings["saved_seconds"] > savings["spent_seconds"] > 0
    assert savings["net_seconds"] == pytest.approx(
        savings["saved_seconds"] - savings["spent_seconds"]
    )
    batch = client.get("/v1/balance/batches").json()["batches"][0]
    assert batch["avoided_seconds"] == pytest.approx(savings["saved_seconds"])


def test_the_heat_map_is_relative_to_each_layers_mean(
    run: SyntheticRun, client: TestClient
) -> None:
    run.batch()
    run.batch()
    heat = client.get("/v1/balance/heatmap").json()
    assert (heat["layers"], heat["records"]) == ([0, 1, 2], 6)
    before = np.array(heat["before"])
    assert before.shape == (3, 4)
    assert before.mean(axis=1) == pytest.approx(1, abs=1e-3)
    assert np.max(heat["after"]) < before.max()


def test_history_adds_up(run: SyntheticRun, client: TestClient) -> None:
    for _ in range(3):
        run.batch()
    client.get("/readyz")
    run.batch()
    history = client.get("/v1/balance/history", params={"seconds": 60, "step": 10}).json()
    assert len(history["time_seconds"]) == 6
    assert sum(history["batches"]) == 4
    savings = client.get("/v1/balance").json()["savings"]
    assert sum(history["saved_seconds"]) == pytest.approx(savings["saved_seconds"])
    assert sum(history["spent_seconds"]) == pytest.approx(savings["spent_seconds"], rel=0.2)
    shown = [value for value in history["before_mean"] if value is not None]
    assert shown
    assert all(value > 1 for value in shown)


def test_policies_side_by_side(run: SyntheticRun, client: TestClient) -> None:
    for policy in (Policy.QUOTA, Policy.OFF, Policy.EPLB):
        run.control.set_policy(policy)
        run.batch()
    compared = client.get("/v1/balance/policies").json()["policies"]
    found = {figures["policy"]: figures for figures in compared}
    assert set(found) == {"quota", "eplb"}
    assert found["quota"]["batches"] == 1
    assert (
        found["eplb"]["imbalance"]["after"]["mean"] > found["quota"]["imbalance"]["after"]["mean"]
    )
    assert found["quota"]["compute_microseconds_per_token"] > 0


def test_health_of_every_rank(tmp_path: Path, run: SyntheticRun, client: TestClient) -> None:
    ranks = client.get("/v1/ranks").json()
    assert ranks["ready"] is True
    assert ranks["ranks"][0]["last_batch_age_seconds"] is None
    run.batch()
    run.recorders[1].set_state(RingState.FAILED)
    ring_path(tmp_path, 2).unlink()
    ranks = client.get("/v1/ranks").json()
    assert ranks["ready"] is False
    assert [rank["state"] for rank in ranks["ranks"]] == ["ready", "failed", "missing", "ready"]
    assert [bool(rank["problem"]) for rank in ranks["ranks"]] == [False, True, True, False]
    assert 0 <= ranks["ranks"][0]["last_batch_age_seconds"] < 60
    overview = client.get("/v1/overview").json()
    assert set(overview["reasons"]) == {"1", "2"}
    assert overview["last_batch"]["batch"] == 1


def test_an_overview_without_an_engine(tmp_path: Path) -> None:
    overview = TestClient(create_app(tmp_path, None, False)).get("/v1/overview").json()
    assert (overview["ready"], overview["engine"], overview["ranks"]) == (False, None, [])
    assert "run" in overview["reasons"]


def test_a_switch_is_seen_at_once(tmp_path: Path, run: SyntheticRun) -> None:
    settings = SidecarSettings(reuse_seconds=3600)
    client = TestClient(create_app(tmp_path, TOKEN, False, settings=settings))
    for policy in ("eplb", "off", "quota"):
        client.post("/v1/control/policy", json={"policy": policy}, headers=BEARER)
        assert client.get("/v1/config").json()["policy"] == policy


def test_pause_and_resume(run: SyntheticRun, client: TestClient) -> None:
    for action in ("pause", "resume"):
        assert client.post(f"/v1/control/{action}").status_code == 401
    assert client.post("/v1/control/resume", headers=BEARER).status_code == 409
    run.control.set_policy(Policy.EPLB)
    for _ in range(2):  # the second changes nothing
        assert client.post("/v1/control/pause", headers=BEARER).json()["policy"] == "off"
    assert run.control.policy is Policy.OFF
    config = client.get("/v1/config").json()
    assert (config["policy"], config["paused_policy"]) == ("off", "eplb")
    assert client.get("/v1/overview").json()["paused_policy"] == "eplb"
    assert client.post("/v1/control/resume", headers=BEARER).json()["policy"] == "eplb"
    assert run.control.policy is Policy.EPLB
    assert client.get("/v1/config").json()["paused_policy"] is None
    client.post("/v1/control/pause", headers=BEARER)
    client.post("/v1/control/policy", json={"policy": "quota"}, headers=BEARER)
    assert client.get("/v1/config").json()["paused_policy"] is None


def test_the_threshold_is_set_and_taken_back(run: SyntheticRun, client: TestClient) -> None:
    path = "/v1/control/threshold"
    assert client.post(path, json={"max_imbalance": 1.5}).status_code == 401
    for wrong in (0.9, "x", 1e9):
        answer = client.post(path, json={"max_imbalance": wrong}, headers=BEARER)
        assert answer.status_code == 422
    assert client.post(path, json={}, headers=BEARER).status_code == 422
    assert run.control.max_imbalance_millionths == 0
    for value, millionths in ((1.25, 1_250_000), (None, 0)):
        answer = client.post(path, json={"max_imbalance": value}, headers=BEARER)
        assert answer.json()["max_imbalance"] == value
        assert run.control.max_imbalance_millionths == millionths
        assert client.get("/v1/config").json()["max_imbalance"] == value


def test_a_damaged_pause_is_no_pause(tmp_path: Path, run: SyntheticRun, client: TestClient) -> None:
    (tmp_path / "paused").write_bytes(b"\xff" * 100)
    assert client.get("/v1/config").json()["paused_policy"] is None
    assert client.post("/v1/control/resume", headers=BEARER).status_code == 409


def test_what_may_be_set_is_said(tmp_path: Path, run: SyntheticRun, client: TestClient) -> None:
    config = client.get("/v1/config").json()
    assert config["control_open"] is True
    assert "ideal" not in config["policies"]
    closed = TestClient(create_app(tmp_path, None, True)).get("/v1/config").json()
    assert closed["control_open"] is False
    assert "ideal" in closed["policies"]


def test_every_figure_is_explained(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "max/mean of assignments over ranks" in document["info"]["description"]
    obvious = {"layer", "ranks", "schema_version"}
    for name in ("ImbalanceSnapshot", "Savings", "BatchLayer", "Heatmap", "History", "Replica"):
        for field, described in schemas[name]["properties"].items():
            assert field in obvious or "description" in described, (name, field)
    for name, schema in schemas.items():
        assert schema.get("description") or "Error" in name, name


def test_answers_that_stand_alone_have_a_schema_version(
    run: SyntheticRun, client: TestClient
) -> None:
    run.batch()
    batch = "/v1/balance/batches/1"
    for path in (
        *("/v1/overview", "/v1/ranks", "/v1/config", "/readyz", "/v1/balance"),
        *("/v1/balance/heatmap", "/v1/balance/history", "/v1/balance/policies"),
        *("/v1/balance/batches", "/v1/balance/layers/0", batch, f"{batch}/layers/0"),
    ):
        assert client.get(path).json()["schema_version"] == 1


def test_pages_load_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/docs", "/v1/config", "/static/main.js", "/nowhere"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert "http" not in client.get("/").text.replace("http-equiv", "")
    licence = client.get("/static/vendor/uplot/LICENSE")
    assert "MIT License" in licence.text
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_events_are_pushed(tmp_path: Path, run: SyntheticRun) -> None:
    run.batch()
    app = create_app(tmp_path, None, False, settings=SidecarSettings(event_seconds=0.01))
    sent: list[bytes] = []

    async def listen() -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, bytes]) -> None:
            sent.append(message.get("body", b""))
            app.state.stopping = len(sent) > 3

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/events",
            "raw_path": b"/v1/events",
            "query_string": b"seconds=60",
            "headers": [],
            "app": app,
        }
        await app(scope, receive, send)  # type: ignore[arg-type]  # it ends when told to stop

    asyncio.run(listen())
    name, data, *_ = sent[1].decode().split("\n")
    assert name == "event: overview"
    assert json.loads(data.removeprefix("data: "))["last_batch"]["batch"] == 1


def test_answers_are_shared_for_a_moment() -> None:
    made = []

    def make() -> RankList:
        made.append(1)
        return RankList(True, [])

    answers = Answers(reuse_seconds=3600)
    assert answers.encoded("a", make) == answers.encoded("a", make)
    answers.encoded("b", make)
    assert len(made) == 2
    for key in range(100):
        answers.encoded(key, make)
    answers.encoded("a", make)  # has given way
    assert len(made) == 103


def test_an_answer_is_made_anew_behind_those_who_ask() -> None:
    made, may_end = [threading.Event(), threading.Event()], threading.Event()

    def make() -> RankList:
        if not made[0].is_set():
            made[0].set()
            return RankList(True, [])
        may_end.wait(60)
        made[1].set()
        return RankList(False, [])

    answers = Answers(reuse_seconds=3600)
    first = answers.encoded("a", make)
    answers._answers["a"].made_at -= 2000
    assert answers.encoded("a", make) == first  # nobody waits
    may_end.set()
    assert made[1].wait(60)
    with answers._answers["a"].lock:
        assert answers.encoded("a", make) != first


def test_one_line_per_change_of_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RunStore(tmp_path)
    log = StateLog(store)

    def lines() -> list[str]:
        caplog.clear()
        store.poll()
        log.look()
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO):
        assert len(lines()) == 1
        run = SyntheticRun(tmp_path, SHAPE, LAYERS)
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


def test_logs_can_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        set_up_logging("json")
        fields = {"event": "state", "ready": True}
        logging.getLogger("x").info("said %d", 1, extra={"fields": fields})
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["level"], line["event"]) == ("said 1", "info", "state")
    assert line["time"].startswith(time.strftime("%Y-%m-%d", time.gmtime()))
