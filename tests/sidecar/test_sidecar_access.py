"""Who may see and change settings, who is refused, and how much anybody may send."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from tests.support.bench_fakes import serving
from tests.support.ring_files import create
from tests.support.sidecar_runs import BEARER, TOKEN, SkewedRun
from ultraep_serve.config import BalanceConfig
from ultraep_serve.sidecar import access
from ultraep_serve.sidecar.access import server_settings
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import ExpertShape, Policy

LIMIT = 64 << 10
FEW, HEAD_SECONDS = 8, 0.5
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


def unread() -> Iterator[bytes]:
    """A body that nobody may read."""
    pytest.fail("the body was read")
    yield b""


@pytest.mark.parametrize(
    ("headers", "token", "wanted"),
    [
        ({}, TOKEN, 401),
        ({"Authorization": "Bearer wrong"}, TOKEN, 401),
        ({"Authorization": f"Basic {TOKEN}"}, TOKEN, 401),
        (BEARER, None, 403),
        (BEARER, "", 403),
        (BEARER, TOKEN, 411),
        ({**BEARER, "Content-Length": str(LIMIT + 1)}, TOKEN, 413),
    ],
)
def test_nothing_is_read_of_who_may_not_change_anything(
    headers: dict[str, str], token: str | None, wanted: int, tmp_path: Path
) -> None:
    client = TestClient(create_app(tmp_path, token))
    answer = client.post("/v1/control/policy", content=unread(), headers=headers)
    assert (answer.status_code, answer.json().keys()) == (wanted, {"detail"})


def test_probes_may_ask_for_the_head_alone(tmp_path: Path, client: TestClient) -> None:
    routes = [r for r in create_app(tmp_path, TOKEN).routes if isinstance(r, APIRoute)]
    paths = [route.path.replace("{layer}", "0") for route in routes if "GET" in route.methods]
    assert "/readyz" in paths
    for path in ("/", "/static/page.js", *paths):
        assert client.head(path).status_code == client.get(path).status_code
    assert client.head("/v1/control/policy", headers=BEARER).status_code == 405
    with serving(**server_settings(create_app(tmp_path, TOKEN))) as url:
        assert httpx.head(f"{url}/readyz").content == b""


def test_whatever_reads_a_body_needs_the_token(tmp_path: Path, client: TestClient) -> None:
    routes = [r for r in create_app(tmp_path, TOKEN).routes if isinstance(r, APIRoute)]
    changing = [route for route in routes if route.body_field or route.methods - {"GET"}]
    assert changing
    for route in changing:
        for method in route.methods:
            assert client.request(method, route.path).status_code == 401


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"\\ud800"'])
def test_values_that_json_cannot_answer_are_refused(value: str, client: TestClient) -> None:
    """An answer that showed them would be no JSON, or no UTF-8."""
    headers = {**BEARER, "Content-Type": "application/json"}
    body = f'{{"policy": {value}, "other": [{value}]}}'
    answer = client.post("/v1/control/policy", content=body, headers=headers)
    assert (answer.status_code, answer.json().keys()) == (422, {"detail"})


def test_config_shows_the_settings_and_no_secret(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    settings = json.loads(BalanceConfig(slots=3).to_json())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "control_token": TOKEN}))
    answer = client.get("/v1/config")
    assert answer.json()["config"]["slots"] == 3
    assert answer.json()["schema_version"] == 3
    assert TOKEN not in answer.text
    assert answer.json()["control_open"] is True
    closed = TestClient(create_app(tmp_path, None))
    assert closed.get("/v1/config").json()["control_open"] is False


def test_the_policy_is_switched_by_who_has_the_token(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = {"policy": "off"}
    answer = client.post("/v1/control/policy", json=body)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert engine.policy is Policy.QUOTA
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    wanted = {"policy": "off", "schema_version": 3}
    assert (answer.status_code, answer.json()) == (200, wanted)
    assert engine.policy is Policy.OFF
    assert client.get("/v1/balance").json()["policy"] == "off"
    for wrong in ({"policy": "best"}, {}, {"policy": "off", "for": "ever"}, None):
        assert client.post("/v1/control/policy", json=wrong, headers=BEARER).status_code == 422
    engine.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_ideal_needs_a_server_that_was_started_for_it(
    tmp_path: Path, client: TestClient, allowed: bool
) -> None:
    rank = create(tmp_path, 0, ExpertShape(1, 4, 1))
    engine = ControlPage.create(tmp_path, Policy.QUOTA, allow_ideal=allowed)
    assert ("ideal" in client.get("/v1/balance").json()["policies"]) is allowed
    answer = client.post("/v1/control/policy", json={"policy": "ideal"}, headers=BEARER)
    assert answer.status_code == (200 if allowed else 409)
    assert allowed or "--allow-ideal" in answer.json()["detail"]
    assert engine.policy is (Policy.IDEAL if allowed else Policy.QUOTA)
    engine.close()
    rank.close()


def test_without_a_page_nothing_is_switched(client: TestClient) -> None:
    answer = client.post("/v1/control/policy", json={"policy": "off"}, headers=BEARER)
    assert answer.status_code == 409
    assert "--policy off" in answer.json()["detail"]


OWN_NAMES = (
    "127.0.0.1:8001", "[::1]:8001", "10.1.2.3", "localhost:8001", "balance.localhost",
    f"{socket.gethostname().upper()}:8001",
    "engine:8001",  # as in a container's network
    "Balance.Example.com.:443",
)  # fmt: skip
FOREIGN_NAMES = (
    "attacker.example", "attacker.example:8001", "127.0.0.1.attacker.example", "example.com",
    "localhost.attacker.example", "[::1].attacker.example:8001",
)  # fmt: skip


@pytest.mark.parametrize("host", [*OWN_NAMES, *FOREIGN_NAMES])
def test_only_known_names_are_answered(host: str, tmp_path: Path) -> None:
    client = TestClient(create_app(tmp_path, None, ("", "balance.example.com")))
    for path in ("/healthz", "/", "/v1/control/policy"):
        answer = client.get(path, headers={"Host": host})
        assert (answer.status_code == 421) == (host in FOREIGN_NAMES)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a sidecar that lets few connections wait, and has little time for heads."""
    monkeypatch.setattr(access, "_MAX_WAITING", FEW)
    monkeypatch.setattr(access, "_HEAD_SECONDS", HEAD_SECONDS)
    with serving(**access.server_settings(create_app(tmp_path, None))) as url:
        yield url


@contextlib.contextmanager
def connected(url: str, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 30) as connection:
        connection.sendall(sent)
        yield connection


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /heal",
        REQUEST,
        REQUEST + b"\r\n" + REQUEST,
        REQUEST + b"Content-Length: 9\r\n\r\n",  # and the body does not come
    ],
)
def test_heads_end_in_time_or_the_connection_does(address: str, sent: bytes) -> None:
    with connected(address, sent) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            received = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
    assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")


def test_bytes_now_and_then_win_no_time_and_a_head_has_an_end(address: str) -> None:
    with connected(address, REQUEST) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(HEAD_SECONDS / 20)
        answer = None
        while answer != b"":
            connection.sendall(b"X: x\r\n")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(4096)
    with connected(address, REQUEST) as connection, contextlib.suppress(ConnectionError):
        with contextlib.suppress(ConnectionError):
            connection.sendall(100 * (b"X: " + b"x" * 4096 + b"\r\n"))
        assert b"400" in connection.recv(4096)
    assert httpx.get(f"{address}/healthz").status_code == 200


def test_slow_heads_keep_no_probe_out(tmp_path: Path) -> None:
    """More connections that never finish a head than may wait, with the limits as they are."""
    with (
        serving(**access.server_settings(create_app(tmp_path, None))) as url,
        contextlib.ExitStack() as held,
        httpx.Client(base_url=url) as client,
    ):
        for number in range(2 * access._MAX_WAITING):
            held.enter_context(connected(url, REQUEST))
            if number % 16 == 0:
                assert client.get("/readyz").json()["status"] == "not ready"
                assert httpx.get(f"{url}/healthz").status_code == 200


def test_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    settings = access.server_settings(create_app(tmp_path, None))
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        for path in ("/", "/v1/config", "/static/page.js", "/nowhere", "/readyz"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "http" not in client.get("/").text.replace("http-equiv", "")
        assert client.get("/static/../app.py").status_code == 404
        assert client.get("/static/%2e%2e/app.py").status_code == 404
