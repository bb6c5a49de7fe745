"""Who holds connections open, sends endless heads or comes by a strange name keeps nobody out."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.support.bench_fakes import serving
from tests.support.rings import SyntheticRun
from ultraep_serve.sidecar import connections, metrics, routes_balance
from ultraep_serve.sidecar.app import AppOptions, create_app

FEW, HEAD_SECONDS = 8, 0.5
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a sidecar with few connections and little time for heads."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", FEW)
    monkeypatch.setattr(connections, "HEAD_SECONDS", HEAD_SECONDS)
    app = create_app(tmp_path, None, False)
    settings = connections.server_settings(app) | {"timeout_keep_alive": 5}
    with serving(**settings) as url:
        yield url


@contextlib.contextmanager
def connected(url: str, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 30) as connection:
        connection.sendall(sent)
        yield connection


@pytest.mark.parametrize("sent", [b"", b"GET /heal", REQUEST, REQUEST + b"\r\n" + REQUEST])
def test_heads_end_in_time_or_the_connection_does(address: str, sent: bytes) -> None:
    with connected(address, sent) as connection:
        received = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
    assert received.count(b"200 OK") == sent.count(b"\r\n\r\n")


def test_a_connection_without_an_end_of_its_head_is_refused(address: str) -> None:
    with connected(address, REQUEST) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"X: " + b"x" * 4096 + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"400" in connection.recv(4096)
    assert httpx.get(f"{address}/healthz").status_code == 200


def test_idle_connections_give_way_to_whoever_asks(address: str) -> None:
    with contextlib.ExitStack() as held, httpx.Client(base_url=address) as client:
        assert client.get("/healthz").status_code == 200
        for _ in range(5 * FEW):
            held.enter_context(connected(address, b"GET"))
            assert client.get("/healthz").status_code == 200
        assert httpx.get(f"{address}/healthz").status_code == 200


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
    client = TestClient(create_app(tmp_path, None, False, options=options))
    for path in ("/healthz", "/", "/metrics", "/v1/control/policy"):
        answer = client.get(path, headers={"Host": host})
        assert (answer.status_code == 421) == (status == 421)


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [("/metrics?detail=true", metrics, "summarise"), ("/v1/ranks", routes_balance, "rank_list")],
)
def test_costly_answers_are_computed_once_for_all(
    path: str,
    module: ModuleType,
    name: str,
    tmp_path: Path,
    planned_run: SyntheticRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned_run.batch()
    app = create_app(tmp_path, None, False, options=AppOptions(reuse_seconds=60.0))
    asked, real = [0], getattr(module, name)

    def counted(*arguments: Any) -> Any:
        asked[0] += 1
        return real(*arguments)

    monkeypatch.setattr(module, name, counted)
    with TestClient(app) as client:
        client.get(path)
        threads = [threading.Thread(target=client.get, args=(path,)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert asked[0] == 1
