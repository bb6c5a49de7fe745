"""Settings: who may see and change them, and what they then are."""

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.sidecar_runs import BEARER, TOKEN, SkewedRun
from ultraep_serve.config import BalanceConfig
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Policy


def test_config_shows_the_settings_and_no_secret(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    settings = json.loads(BalanceConfig(slots=3).to_json())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "control_token": TOKEN}))
    answer = client.get("/v1/config")
    assert answer.json()["config"]["slots"] == 3
    assert answer.json()["schema_version"] == 3
    assert TOKEN not in answer.text


def test_the_policy_is_switched_by_who_has_the_token(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = {"policy": "off"}
    answer = client.post("/v1/control/policy", json=body)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert engine.policy is Policy.QUOTA
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    wanted = {"policy": "off", "sequence": 1, "schema_version": 3}
    assert (answer.status_code, answer.json()) == (200, wanted)
    assert engine.policy is Policy.OFF
    assert client.get("/v1/config").json()["policy"] == "off"
    assert client.get("/v1/balance").json()["policy"] == "off"
    for wrong in ({"policy": "best"}, {}, {"policy": "off", "for": "ever"}, None):
        assert client.post("/v1/control/policy", json=wrong, headers=BEARER).status_code == 422
    engine.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_ideal_needs_a_server_that_was_started_for_it(
    tmp_path: Path, client: TestClient, allowed: bool
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA, allow_ideal=allowed)
    assert ("ideal" in client.get("/v1/config").json()["policies"]) is allowed
    answer = client.post("/v1/control/policy", json={"policy": "ideal"}, headers=BEARER)
    assert answer.status_code == (200 if allowed else 409)
    assert allowed or "--allow-ideal" in answer.json()["detail"]
    assert engine.policy is (Policy.IDEAL if allowed else Policy.QUOTA)
    engine.close()


def test_without_a_page_nothing_is_switched(client: TestClient) -> None:
    answer = client.post("/v1/control/policy", json={"policy": "off"}, headers=BEARER)
    assert answer.status_code == 409
    assert "--policy off" in answer.json()["detail"]


def test_whether_control_is_open_is_said(tmp_path: Path, client: TestClient) -> None:
    closed = TestClient(create_app(tmp_path, None))
    assert client.get("/v1/config").json()["control_open"] is True
    assert closed.get("/v1/config").json()["control_open"] is False
