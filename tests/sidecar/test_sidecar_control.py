"""Settings: who may see and change them, and what they then are."""

import json
from pathlib import Path

from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import BEARER, TOKEN, SkewedRun
from ultraep_serve.config import BalanceConfig
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Policy, SpeedSource


def test_config_shows_the_settings_and_no_secret(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    settings = json.loads(BalanceConfig(slots=3).to_json())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "control_token": TOKEN}))
    answer = client.get("/v1/config")
    assert answer.json()["config"]["slots"] == 3
    assert answer.json()["schema_version"] == 2
    assert TOKEN not in answer.text


def test_the_policy_is_switched_by_who_has_the_token(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = {"policy": "off"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = client.post("/v1/control/policy", json=body, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert engine.policy is Policy.QUOTA
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    wanted = {"policy": "off", "sequence": 1, "schema_version": 2, "lease_seconds": None}
    assert (answer.status_code, answer.json()) == (200, wanted)
    assert engine.policy is Policy.OFF
    assert client.get("/v1/config").json()["policy"] == "off"
    assert client.get("/v1/balance").json()["policy"] == "off"
    for wrong in ({"policy": "best"}, {}, {"policy": "off", "for": "ever"}, None):
        assert client.post("/v1/control/policy", json=wrong, headers=BEARER).status_code == 422
    assert client.get("/v1/control/policy").status_code == 405
    engine.close()


def test_the_ideal_policy_needs_permission(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = {"policy": "ideal"}
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    assert answer.status_code == 403
    assert "--allow-ideal" in answer.json()["detail"]
    assert engine.policy is Policy.QUOTA
    allowed = TestClient(create_app(tmp_path, TOKEN, True))
    assert allowed.post("/v1/control/policy", json=body, headers=BEARER).status_code == 200
    assert engine.policy is Policy.IDEAL
    engine.close()


def test_without_a_token_or_a_page_nothing_is_switched(tmp_path: Path, client: TestClient) -> None:
    body = {"policy": "off"}
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    assert answer.status_code == 409
    assert "--policy off" in answer.json()["detail"]
    closed = TestClient(create_app(tmp_path, "", False))
    empty = {"Authorization": "Bearer "}
    assert closed.post("/v1/control/policy", json=body, headers=empty).status_code == 403


def test_a_switch_is_seen_at_once(tmp_path: Path, planned_run: SyntheticRun) -> None:
    options = AppOptions(reuse_seconds=3600)
    client = TestClient(create_app(tmp_path, TOKEN, False, options=options))
    for policy in ("off", "quota"):
        client.post("/v1/control/policy", json={"policy": policy}, headers=BEARER)
        assert client.get("/v1/config").json()["policy"] == policy


def test_pause_and_resume(planned_run: SyntheticRun, client: TestClient) -> None:
    for action in ("pause", "resume"):
        assert client.post(f"/v1/control/{action}").status_code == 401
    assert client.post("/v1/control/resume", headers=BEARER).status_code == 409
    for _ in range(2):  # the second changes nothing
        assert client.post("/v1/control/pause", headers=BEARER).json()["policy"] == "off"
    assert planned_run.control.policy is Policy.OFF
    config = client.get("/v1/config").json()
    assert (config["policy"], config["paused_policy"]) == ("off", "quota")
    assert client.get("/v1/overview").json()["paused_policy"] == "quota"
    assert client.post("/v1/control/resume", headers=BEARER).json()["policy"] == "quota"
    assert planned_run.control.policy is Policy.QUOTA
    assert client.get("/v1/config").json()["paused_policy"] is None
    client.post("/v1/control/pause", headers=BEARER)
    client.post("/v1/control/policy", json={"policy": "quota"}, headers=BEARER)
    assert client.get("/v1/config").json()["paused_policy"] is None


def test_the_threshold_is_set_and_taken_back(planned_run: SyntheticRun, client: TestClient) -> None:
    path = "/v1/control/threshold"
    assert client.post(path, json={"max_imbalance": 1.5}).status_code == 401
    for wrong in (0.9, "x", 1e9):
        answer = client.post(path, json={"max_imbalance": wrong}, headers=BEARER)
        assert answer.status_code == 422
    assert client.post(path, json={}, headers=BEARER).status_code == 422
    assert planned_run.control.max_imbalance_millionths == 0
    for value, millionths in ((1.25, 1_250_000), (None, 0)):
        answer = client.post(path, json={"max_imbalance": value}, headers=BEARER)
        assert answer.json()["max_imbalance"] == value
        assert planned_run.control.max_imbalance_millionths == millionths
        assert client.get("/v1/config").json()["max_imbalance"] == value


def test_speeds_are_set_and_taken_back(planned_run: SyntheticRun, client: TestClient) -> None:
    path = "/v1/control/speeds"
    assert client.post(path, json={"speeds": "equal"}).status_code == 401
    for wrong in ("configured", "1.0,0.5", 1):
        answer = client.post(path, json={"speeds": wrong}, headers=BEARER)
        assert answer.status_code == 422
    assert planned_run.control.speeds is SpeedSource.CONFIGURED
    for value, source in (("equal", SpeedSource.EQUAL), (None, SpeedSource.CONFIGURED)):
        answer = client.post(path, json={"speeds": value}, headers=BEARER)
        assert answer.json()["speeds"] == value
        assert planned_run.control.speeds is source
        assert client.get("/v1/config").json()["speeds"] == value


def test_a_damaged_pause_is_no_pause(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    (tmp_path / "paused").write_bytes(b"\xff" * 100)
    assert client.get("/v1/config").json()["paused_policy"] is None
    assert client.post("/v1/control/resume", headers=BEARER).status_code == 409


def test_what_may_be_set_is_said(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    config = client.get("/v1/config").json()
    assert config["control_open"] is True
    assert "ideal" not in config["policies"]
    closed = TestClient(create_app(tmp_path, None, True)).get("/v1/config").json()
    assert closed["control_open"] is False
    assert "ideal" in closed["policies"]
