"""A wrong or hostile server where the sidecar should be: one line, in bounded time and memory."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ultraep_serve.cli import main
from ultraep_serve.system.http import Endpoint
from ultraep_serve.telemetry.control import RecordLevel
from ultraep_serve.telemetry.spool import _LAYOUT, _MAGIC, PAGE_BYTES

MIXED = {"before": {"mean": 2.0, "max": 3.0}, "after": {"mean": 1.0, "max": 1.0}}
SPOOL = {"rank": 0, "number": 1, "batches": 1, "lost_batches": 0, "is_open": False}


def header(layers: int, ranks: int = 1) -> bytes:
    """The first page of a spool that says it has so many layers and ranks."""
    sizes = (0, ranks, layers, 64, 1, 1)
    page = _LAYOUT.pack(_MAGIC, 1, 0, 0, 1, RecordLevel.TOKENS, *sizes, b"vllm")
    return page.ljust(PAGE_BYTES, b"\0")


class Hostile(BaseHTTPRequestHandler):
    """Answers with what ``answers`` has for a path, or with an empty object."""

    answers: dict[str, bytes]
    asked: set[str]

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.add(f"{self.command} {self.path}")
        content = self.answers.get(self.path.partition("?")[0], b"{}")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = answer  # names that the base class calls

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def hostile() -> Iterator[tuple[str, type[Hostile]]]:
    """Its address, and what it answers by path."""
    handler = type("Answers", (Hostile,), {"answers": {}, "asked": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


DEEP = b"[" * 100_000
NOWHERE = "the same address"
ADVISE = ["advise", "--hardware", "h100", "--model-config", "qwen3-30b-a3b", "--sidecar"]
RECORD = ["record", "--token", "x", "--seconds", "0.1", "--out", "out.npz", "--sidecar"]
BENCH = ["bench", "prefill", "--token", "x", "--repeats", "1", "--warmup", "0"]
BENCH += ["--prompt-tokens", "64", "--policies", "quota", "--sidecar", NOWHERE, "--url"]
WRONG_ENGINE = {
    "/v1/models": b'{"data": [{"id": "m"}]}',
    "/tokenize": json.dumps({"count": 64, "tokens": list(range(64))}).encode(),
    "/v1/config": b'{"policy": "quota"}',
    "/v1/control/lease": b'{"lease": "0123456789abcdef"}',
    "/v1/completions": b'data: {"choices": [{"text": "x"}]}\n\n',
    "/v1/balance": b'{"layers": []}',
}


def balance(**changes: Any) -> bytes:
    figures = {"policy": "quota", "num_ranks": 2, "mode": "data", "imbalance": MIXED}
    return json.dumps({**figures, **changes}).encode()


def recorded(spool: bytes, **changes: Any) -> dict[str, bytes]:
    return {
        "/v1/balance": balance(),
        "/v1/control/record": b'{"number": 1}',
        "/v1/record": json.dumps({"spools": [{**SPOOL, **changes}]}).encode(),
        "/v1/record/spool/0": spool,
    }


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        *((ADVISE, {"/v1/balance": content}) for content in (
            DEEP, b"[]", b"\0", b'{"num_ranks": NaN}', balance(num_ranks=0), balance(num_ranks=[]),
            balance(imbalance={"before": {"mean": "x"}, "after": {"mean": 1}}),
            balance(layers=[{}]), balance(layers=5), balance(num_ranks=10**30),
        )),
        *((ADVISE, {"/v1/balance": balance(), "/v1/balance/batches": content}) for content in (
            b'{"batches": [5]}', b'{"batches": [{"tokens": "x"}]}', b'{"batches": 5}',
        )),
        *((RECORD, {"/v1/balance": content}) for content in (DEEP, balance(num_ranks=0))),
        *((RECORD, recorded(header(2), **changes)) for changes in (
            {"rank": "x"}, {"batches": None}, {"number": []}, {"is_open": None, "rank": {}},
        )),
        *((RECORD, recorded(spool)) for spool in (
            b"", DEEP, header(200_000_000), header(2, ranks=1 << 31), header(2) + b"UEPC" * 500,
        )),
        (RECORD, {**recorded(b""), "/v1/record": b'{"spools": 5}'}),
        *((BENCH, {**WRONG_ENGINE, **answers}) for answers in (
            {"/v1/models": DEEP}, {"/v1/models": b'{"data": [5]}'}, {"/v1/models": b'{"data": {}}'},
            {"/v1/completions": b"data: " + DEEP}, {"/v1/completions": b"data: NaN"},
            {"/v1/completions": b"data: {\"choices\": 5}"},
            {"/v1/completions": b"data: {\"usage\": [5]}"},
            {"/v1/completions": b'data: {"choices": [[]]}'}, {"/v1/completions": b""},
            {"/tokenize": b'{"count": 0, "tokens": [[]]}'}, {"/v1/config": b'{"policy": "x"}'},
            {"/v1/config": DEEP}, {"/v1/balance": b'{"layers": 5}'}, {"/v1/balance": DEEP},
            {"/v1/control/lease": DEEP}, {"/v1/control/lease": b'{"lease": ["/"]}'},
        )),
        *((["status", "--url"], {"/v1/balance": content, "/readyz": b"{}"}) for content in (
            DEEP, b"[]", b'{"engine": "x"}', balance(engine="vllm", batches=5),
        )),
    ],
)  # fmt: skip
def test_one_line_for_every_answer(
    words: list[str],
    answers: dict[str, bytes],
    hostile: tuple[str, type[Hostile]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    url, sidecar = hostile
    sidecar.answers.update(answers)
    words = [url if word == NOWHERE else word for word in words]
    assert main([*words, url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ultraep-serve: error: ")
    assert not os.listdir(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


class Endless(BaseHTTPRequestHandler):
    """Answers every request with bytes until the client has enough."""

    piece, pause, head = b"[" * (1 << 16), 0.0, b"HTTP/1.0 200 OK\r\n\r\n"

    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(self.head)
            while True:
                self.wfile.write(self.piece)
                time.sleep(self.pause)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "answered /v1/balance with more than"),
        ({"piece": b" ", "pause": 0.05}, "did not answer in time"),
        ({"piece": b"X-A: b\r\n", "pause": 0.05, "head": b"HTTP/1.0 200 OK\r\n"}, "in time"),
    ],
    ids=["endless", "slow", "slow-head"],
)
@pytest.mark.parametrize("words", [["status", "--url"], ADVISE], ids=["status", "advise"])
def test_an_answer_ends_in_size_and_time(
    words: list[str],
    answer: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    init = Endpoint.__init__

    def impatient(self: Endpoint, name: str, flag: str, url: str, timeout_seconds: float) -> None:
        init(self, name, flag, url, 1.0 if "pause" in answer else timeout_seconds)

    monkeypatch.setattr(Endpoint, "__init__", impatient)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (Endless,), answer)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main([*words, f"http://127.0.0.1:{server.server_port}"]) == 2
        server.shutdown()
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


def test_sigterm_ends_a_recording_on_the_server_too(
    hostile: tuple[str, type[Hostile]], tmp_path: Path
) -> None:
    url, sidecar = hostile
    sidecar.answers.update(recorded(header(2), batches=0))
    words = [sys.executable, "-m", "ultraep_serve.cli", *RECORD, url, "--seconds", "600"]
    running = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=tmp_path)
    while "GET /v1/record" not in sidecar.asked:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    output, errors = running.communicate(timeout=60)
    assert "writing what was recorded" in output
    assert running.returncode == 2  # there was nothing
    assert len(errors.splitlines()) == 1


def test_a_recording_that_is_deleted_meanwhile_is_not_waited_for(
    hostile: tuple[str, type[Hostile]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, sidecar = hostile
    sidecar.answers.update(recorded(header(2), batches=0))

    def delete() -> None:
        while "GET /v1/record" not in sidecar.asked:
            time.sleep(0.05)
        sidecar.answers["/v1/record"] = b'{"spools": []}'

    threading.Thread(target=delete).start()
    out = str(tmp_path / "out.npz")
    assert main(["record", "--token", "x", "--batches", "5", "--out", out, "--sidecar", url]) == 2
    assert "deleted on the server meanwhile" in capsys.readouterr().err
