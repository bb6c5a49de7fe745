"""`ultraep-serve doctor --port`: a server is asked where and how it listens, as is its sidecar."""

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from fastapi import FastAPI

from tests.support.bench_fakes import serving
from tests.support.rings import planned_run, run_directory
from ultraep_lab.this_machine import free_port
from ultraep_serve.cli import main
from ultraep_serve.config import BalanceConfig, SidecarSettings
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry import run_directory as run_directories
from ultraep_serve.telemetry.run_files import RunFiles

Doctor = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Doctor]:
    """What it finds of a balanced server that this process is, by name, at the address given."""
    monkeypatch.setattr(run_directories, "SHARED_MEMORY", tmp_path)
    with run_directory() as path:
        run = planned_run(path)

        def found(url: str, sidecar: SidecarSettings | None = None) -> dict[str, dict[str, Any]]:
            RunFiles(path).write_config(BalanceConfig(sidecar=sidecar).to_json())
            main(["doctor", "--port", str(urlsplit(url).port), "--json"])
            findings = json.loads(capsys.readouterr().out)["findings"]
            return {finding["name"]: finding for finding in findings}

        found.run = run  # type: ignore[attr-defined]
        yield found
        run.close()


def engine() -> FastAPI:
    app = FastAPI()
    app.get("/health")(lambda: None)
    return app


@pytest.mark.parametrize(
    ("host", "asked"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "[::1]"),
        ("::", "[::1]"),
    ],
)
def test_a_server_is_asked_at_the_address_that_it_listens_on(
    host: str, asked: str, doctor: Doctor
) -> None:
    with serving(engine(), host=host) as url:
        found = doctor(url)
    assert found["server"]["status"] == "ok"
    assert found["server"]["seen"] == f"http://{asked}:{urlsplit(url).port}/health answers 200"
    assert "sidecar" not in found  # it has none


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """uvicorn's settings, which are those of both engines, of a certificate for another name."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("serving.example.com")
    authority.cert_pem.write_to_path(folder / "authority")
    issued.private_key_pem.write_to_path(folder / "key")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate")
    return {
        "ssl_keyfile": str(folder / "key"),
        "ssl_certfile": str(folder / "certificate"),
        "ssl_ca_certs": str(folder / "authority"),
    }


def test_a_server_that_speaks_tls_is_asked_by_tls(
    certificates: dict[str, str], doctor: Doctor
) -> None:
    with serving(engine(), **certificates) as url:
        server = doctor(url)["server"]
    assert server["status"] == "ok"
    assert server["seen"] == f"https://127.0.0.1:{urlsplit(url).port}/health answers 200"


def test_a_server_that_wants_a_certificate_is_not_said_to_be_dead(
    certificates: dict[str, str], doctor: Doctor
) -> None:
    with serving(engine(), ssl_cert_reqs=ssl.CERT_REQUIRED, **certificates) as url:
        server = doctor(url)["server"]
    assert server["status"] == "warning"
    assert server["seen"].endswith("/health: it hangs up on a client without a certificate")


def test_a_sidecar_that_has_ended_is_named(tmp_path: Path, doctor: Doctor) -> None:
    with serving(engine()) as url:
        with serving(create_app(tmp_path, None)) as beside:
            port = urlsplit(beside).port
            found = doctor(url, SidecarSettings(host="0.0.0.0", port=port))
            assert (found["sidecar"]["status"], found["server"]["status"]) == ("ok", "ok")
        found = doctor(url, SidecarSettings(port=port))
        assert (found["sidecar"]["status"], found["balancing"]["status"]) == ("warning", "ok")
        assert found["sidecar"]["seen"].startswith(f"127.0.0.1:{port}: no answer (")
        assert (
            f"`ultraep-serve sidecar --host 127.0.0.1 --port {port}`"
            in (found["sidecar"]["remedy"])
        )
        # Another program has its port.
        found = doctor(url, SidecarSettings(port=urlsplit(url).port))
        assert found["sidecar"]["status"] == "warning"
        assert "sidecar" not in doctor(url, SidecarSettings(port=0))  # its log names the port


def hang_up(listening: socket.socket) -> None:
    """On every client, after it has spoken."""
    with suppress(OSError):
        while True:
            client, _ = listening.accept()
            client.recv(1)
            client.close()


def test_a_server_that_nobody_answers_for_is_an_error(doctor: Doctor) -> None:
    found = doctor(f"http://127.0.0.1:{free_port()}")
    assert found["server"]["status"] == "warning"  # nobody listens
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it neither speaks HTTP nor TLS
        threading.Thread(target=hang_up, args=(mute,), daemon=True).start()
        server = doctor(f"http://127.0.0.1:{mute.getsockname()[1]}")["server"]
    assert (server["status"], ": no answer (" in server["seen"]) == ("error", True)
    with serving(FastAPI()) as url:
        found = doctor(url)
        server = found["server"]
        assert (server["status"], server["seen"].endswith("/health answers 404")) == ("error", True)
        assert found["balancing"]["status"] == "ok"
        doctor.run.recorders[1].close()  # type: ignore[attr-defined]
        balancing = doctor(url)["balancing"]
    assert (balancing["status"], balancing["seen"][:14]) == ("error", "not ready (1: ")
