"""A policy that is lent: to one client at a time, and ended by the server itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import BEARER, TOKEN
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry import lease as lease_module
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.lease import Lease
from ultraep_serve.types import Policy

PATH = "/v1/control/lease"


@pytest.fixture
def client(tmp_path: Path, planned_run: SyntheticRun) -> TestClient:
    return TestClient(create_app(tmp_path, TOKEN, True), headers=BEARER)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in ms, in place of the clock's."""
    now = [10**6]
    monkeypatch.setattr(lease_module, "_now_ms", lambda: now[0])
    return now


def take(client: TestClient, policy: str = "ideal", **more: Any) -> Any:
    body = {"policy": policy, "seconds": 30, "holder": "a benchmark", **more}
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_it_ends_by_itself_and_what_was_set_before_holds_again(
    planned_run: SyntheticRun, client: TestClient, clock: list[int]
) -> None:
    page = planned_run.control
    name = take(client)["lease"]
    assert page.policy is Policy.IDEAL
    shown = client.get("/v1/config").json()
    assert (shown["policy"], shown["lease"]["policy_after"]) == ("ideal", "quota")
    assert shown["lease"]["holder"].startswith("a benchmark, since 20")
    clock[0] += 29_000
    take(client, "off", lease=name)  # it is renewed, with another policy
    clock[0] += 29_000
    assert page.policy is Policy.OFF
    clock[0] += 1_000
    assert page.policy is Policy.QUOTA  # with nobody's help
    assert client.get("/v1/config").json()["lease"] is None
    for answer in (
        client.post(PATH, json={"policy": "off", "seconds": 30, "lease": name}),
        client.delete(f"{PATH}/{name}"),
    ):
        assert answer.status_code == 409
        assert "this lease is over" in answer.json()["detail"]
    assert page.policy is Policy.QUOTA


def test_one_client_has_it_and_others_are_told_who(
    planned_run: SyntheticRun, client: TestClient
) -> None:
    name = take(client, "off")["lease"]
    refused = client.post(PATH, json={"policy": "ideal", "seconds": 30})
    assert refused.status_code == 409
    for part in ("lent to a benchmark, since 20", "policy off", "30 s"):
        assert part in refused.json()["detail"]
    assert client.delete(f"{PATH}/{'0' * 16}").status_code == 409
    assert planned_run.control.policy is Policy.OFF
    assert client.delete(f"{PATH}/{name}").json()["policy"] == "quota"
    take(client)  # it is free


def test_a_sidecar_that_was_killed_and_started_again_goes_on_with_it(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    name = take(client, "off")["lease"]
    again = TestClient(create_app(tmp_path, TOKEN, True), headers=BEARER)
    assert again.post(PATH, json={"policy": "ideal", "seconds": 30}).status_code == 409
    take(again, "ideal", lease=name)
    assert again.delete(f"{PATH}/{name}").json()["policy"] == "quota"


@pytest.mark.parametrize(
    ("path", "body", "after"),
    [("policy", {"policy": "off"}, "off"), ("pause", None, "off")],
)
def test_an_operator_ends_it(
    path: str, body: Any, after: str, planned_run: SyntheticRun, client: TestClient
) -> None:
    name = take(client)["lease"]
    assert client.post(f"/v1/control/{path}", json=body).json()["policy"] == after
    assert planned_run.control.policy.value == after
    assert client.delete(f"{PATH}/{name}").status_code == 409
    assert planned_run.control.policy.value == after
    if path == "pause":  # what is resumed is never the lease's policy
        assert client.post("/v1/control/resume").json()["policy"] == "quota"


def test_a_pause_outlives_it(planned_run: SyntheticRun, client: TestClient) -> None:
    client.post("/v1/control/pause")
    name = take(client)["lease"]
    client.delete(f"{PATH}/{name}")
    assert planned_run.control.policy is Policy.OFF
    assert client.post("/v1/control/resume").json()["policy"] == "quota"


def test_wrong_answers_by_hand_are_a_lease_too(
    planned_run: SyntheticRun, client: TestClient, clock: list[int]
) -> None:
    seconds = client.post("/v1/control/policy", json={"policy": "ideal"}).json()["lease_seconds"]
    assert planned_run.control.policy is Policy.IDEAL
    assert client.get("/v1/config").json()["lease"]["seconds_left"] == seconds
    clock[0] += round(seconds * 1000)
    assert planned_run.control.policy is Policy.QUOTA


def test_doubt_outlives_it_and_lends_nothing(
    planned_run: SyntheticRun, client: TestClient, clock: list[int]
) -> None:
    page = planned_run.control
    name = take(client, "quota")["lease"]
    page.switch_off_in_doubt()
    assert page.policy is Policy.OFF
    for body in ({"lease": name}, {}):
        refused = client.post(PATH, json={"policy": "quota", "seconds": 30, **body})
        assert refused.status_code == 409
        assert "switched itself off" in refused.json()["detail"]
    assert client.post("/v1/control/policy", json={"policy": "ideal"}).status_code == 409
    assert client.delete(f"{PATH}/{name}").status_code == 409
    clock[0] += 60_000
    assert (page.policy, page.is_in_doubt) == (Policy.OFF, True)
    # As where the sidecar had looked before the doubt, and writes after it.
    page.set_lease(Lease.of(1, Policy.QUOTA, 30.0))
    assert (page.policy, page.lease, page.is_in_doubt) == (Policy.OFF, None, True)
    assert client.post("/v1/control/policy", json={"policy": "quota"}).status_code == 200
    assert (page.policy, page.is_in_doubt) == (Policy.QUOTA, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0.5}, {"seconds": 3601}, {"seconds": None}, {"policy": "best"},
        {"lease": "1"}, {"lease": "../../../../../x"}, {"holder": ""}, {"holder": "x" * 101},
        {"holder": "half of a character: \ud800"},
    ],
)  # fmt: skip
def test_wrong_values_lend_nothing(
    wrong: dict[str, Any], planned_run: SyntheticRun, client: TestClient
) -> None:
    body = {"policy": "off", "seconds": 30, **wrong}
    content = json.dumps(body)  # as httpx would not write it
    head = {"Content-Type": "application/json"}
    assert client.post(PATH, content=content, headers=head).status_code == 422
    refused = client.post(PATH, content=content, headers={**head, "Authorization": "x"})
    assert refused.status_code == 401
    assert planned_run.control.policy is Policy.QUOTA


def test_ideal_needs_permission(tmp_path: Path, planned_run: SyntheticRun) -> None:
    client = TestClient(create_app(tmp_path, TOKEN, False), headers=BEARER)
    assert client.post(PATH, json={"policy": "ideal", "seconds": 30}).status_code == 403


@pytest.mark.parametrize("word", [(1 << 64) - 1, 1, 0xFF00FF, 1 << 40 | 200])
def test_a_damaged_lease_is_none(word: int, tmp_path: Path) -> None:
    with ControlPage.create(tmp_path, Policy.QUOTA) as page:
        with (tmp_path / "control").open("r+b") as file:
            file.seek(64)
            file.write(word.to_bytes(8, "little") + b"\xff" * 500)
        assert (page.policy, page.lease) == (Policy.QUOTA, None)
