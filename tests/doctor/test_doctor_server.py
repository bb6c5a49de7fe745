"""Ports, and servers that answer well, badly or not at all."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.findings import only
from ultraep_serve.config import SIDECAR_DISTANCE
from ultraep_serve.doctor.finding import Status, Subject
from ultraep_serve.doctor.running_server import check_ports, check_server
from ultraep_serve.system.machine import free_port
from ultraep_serve.telemetry.run_directory import run_directory


class Answers(BaseHTTPRequestHandler):
    """Answers every path as ``answers`` has it."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_GET(self) -> None:
        code, body = self.answers[self.path]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def running(shm: Path) -> Iterator[Subject]:
    """A server that answers as ``Answers`` is told to, in the engine's place and the sidecar's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with run_directory(port):
            yield Subject(port=port, sidecar_port=port)
        server.shutdown()
        thread.join()


def test_a_healthy_server_is_well(running: Subject) -> None:
    Answers.answers = {"/health": (200, b""), "/readyz": (200, b'{"ready": true}')}
    assert [finding.status for finding in check_server(running)] == [Status.OK] * 2
    assert only(check_ports(running)).status is Status.OK


def test_a_silent_rank_is_named(running: Subject) -> None:
    reasons = b'{"ready": false, "reasons": {"1": "process 7 has died"}}'
    Answers.answers = {"/health": (200, b""), "/readyz": (503, reasons)}
    engine, sidecar = check_server(running)
    assert (engine.status, sidecar.status) == (Status.OK, Status.ERROR)
    assert "rank 1: process 7 has died" in sidecar.seen


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"reasons": 3}', b"\xff"])
def test_strange_answers_are_no_accident(body: bytes, running: Subject) -> None:
    Answers.answers = {"/health": (500, body), "/readyz": (503, body)}
    assert [finding.status for finding in check_server(running)] == [Status.ERROR] * 2


def test_a_server_that_does_not_answer_yet_is_an_error(shm: Path) -> None:
    port = free_port()
    with run_directory(port):
        assert [f.status for f in check_server(Subject(port=port))] == [Status.ERROR] * 2


def test_ports_of_others_are_errors(shm: Path) -> None:
    port = free_port()
    subject = Subject(port=port)
    assert [finding.status for finding in check_ports(subject)] == [Status.OK] * 2
    with socket.create_server(("127.0.0.1", port + SIDECAR_DISTANCE)):
        server, sidecar = check_ports(subject)
    assert (server.status, sidecar.status) == (Status.OK, Status.ERROR)
    assert "--sidecar-port" in sidecar.remedy
    assert only(check_server(subject)).status is Status.WARNING


def test_without_a_port_the_defaults_are_looked_at() -> None:
    assert len(check_ports(Subject())) == 2
    assert check_server(Subject()) == []


def test_a_server_that_runs_unbalanced_is_a_warning(running: Subject) -> None:
    body = b'{"ready": true, "status": "unbalanced", "reasons": {"run": "no expert can be moved"}}'
    Answers.answers = {"/health": (200, b""), "/readyz": (200, body)}
    engine, sidecar = check_server(running)
    assert (engine.status, sidecar.status) == (Status.OK, Status.WARNING)
    assert "no expert can be moved" in sidecar.seen
    assert "--on-unsupported=error" in sidecar.remedy
