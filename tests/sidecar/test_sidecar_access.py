"""Who is refused, before anything is read of what they send; and how much anybody may send."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from tests.support.bench_fakes import serving
from tests.support.sidecar_runs import BEARER, TOKEN, SkewedRun, request
from ultraep_serve.sidecar import access
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Policy

LIMIT = 64 << 10
FEW, HEAD_SECONDS = 8, 0.5
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


def posted(app: FastAPI, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Status and answer to a POST whose body nobody may read."""
    sent = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        pytest.fail("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(request(app, "/v1/control/policy", receive, send, "POST", headers))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body)


@pytest.mark.parametrize(
    ("headers", "token", "wanted"),
    [
        ({}, TOKEN, 401),
        ({"Authorization": "Bearer wrong"}, TOKEN, 401),
        ({"Authorization": f"Basic {TOKEN}"}, TOKEN, 401),
        (BEARER, None, 403),
        (BEARER, "", 403),
        ({**BEARER, "Transfer-Encoding": "chunked"}, TOKEN, 411),
        ({**BEARER, "Content-Length": str(LIMIT + 1)}, TOKEN, 413),
    ],
)
def test_nothing_is_read_of_who_may_not_change_anything(
    headers: dict[str, str], token: str | None, wanted: int, tmp_path: Path
) -> None:
    status, answer = posted(create_app(tmp_path, token), headers)
    assert status == wanted
    assert answer.keys() == {"detail"}


def test_a_body_up_to_the_limit_is_accepted(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = b'{"policy": "off"}'.ljust(LIMIT)
    headers = {**BEARER, "Content-Type": "application/json"}
    answer = client.post("/v1/control/policy", content=body, headers=headers)
    assert (answer.status_code, engine.policy) == (200, Policy.OFF)
    engine.close()


def test_whatever_reads_a_body_needs_the_token(tmp_path: Path, client: TestClient) -> None:
    routes = [r for r in create_app(tmp_path, TOKEN).routes if isinstance(r, APIRoute)]
    changing = [route for route in routes if route.body_field or route.methods - {"GET"}]
    assert changing
    for route in changing:
        for method in route.methods:
            assert client.request(method, route.path).status_code == 401


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"\\ud800"'])
def test_values_that_json_cannot_answer_are_refused(value: str, client: TestClient) -> None:
    """An answer that showed them would be no JSON, or no UTF-8."""
    headers = {**BEARER, "Content-Type": "application/json"}
    for body in (value, f'{{"policy": {value}}}', f'{{"policy": "off", "other": [{value}]}}'):
        answer = client.post("/v1/control/policy", content=body, headers=headers)
        assert answer.status_code == 422, body
        assert answer.json()["detail"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8001", 200),
        ("[::1]:8001", 200),
        ("10.1.2.3", 200),
        ("localhost:8001", 200),
        ("balance.localhost", 200),
        (f"{socket.gethostname().upper()}:8001", 200),
        ("engine:8001", 200),  # as in a container's network
        ("Balance.Example.com.:443", 200),
        ("attacker.example", 421),
        ("attacker.example:8001", 421),
        ("127.0.0.1.attacker.example", 421),
        ("localhost.attacker.example", 421),
        ("example.com", 421),
        ("[::1].attacker.example:8001", 421),
    ],
)
def test_only_known_names_are_answered(host: str, status: int, tmp_path: Path) -> None:
    options = AppOptions(allowed_hosts=("", "balance.example.com"))
    client = TestClient(create_app(tmp_path, None, options=options))
    for path in ("/healthz", "/", "/metrics", "/v1/control/policy"):
        answer = client.get(path, headers={"Host": host})
        assert (answer.status_code == 421) == (status == 421)


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


def test_bytes_now_and_then_win_no_time(address: str) -> None:
    with connected(address, REQUEST) as connection:
        connection.settimeout(HEAD_SECONDS / 20)
        with contextlib.suppress(ConnectionError):
            while True:
                connection.sendall(b"X: x\r\n")
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(4096):
                        break


def test_a_head_without_an_end_is_refused(address: str) -> None:
    with connected(address, REQUEST) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"X: " + b"x" * 4096 + b"\r\n")
        with contextlib.suppress(ConnectionError):
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
