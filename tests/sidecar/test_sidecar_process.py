"""The sidecar as its own process: what it imports, binds, writes and refuses."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import ultraep_serve
from tests.support.sidecar_runs import status
from tests.support.waiting import until
from ultraep_lab.this_machine import free_port
from ultraep_serve.config import SidecarSettings
from ultraep_serve.errors import ConfigError
from ultraep_serve.sidecar.serve import control_token, is_loopback, serve
from ultraep_serve.system.environment import TOKEN_VARIABLE
from ultraep_serve.telemetry import run_directory

ROOT = Path(ultraep_serve.__file__).parents[1]


@pytest.fixture(autouse=True)
def no_operator_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def start(run_dir: Path, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", str(run_dir)]
    return subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "ultraep_serve.sidecar.__main__, ultraep_serve.telemetry.recorder",
            {"torch", "numba", "vllm"},
        ),
        (
            "ultraep_serve.telemetry.recorder, ultraep_serve.telemetry.reader",
            {"fastapi", "pydantic"},
        ),
        (
            "ultraep_serve.balance.host.backend, ultraep_lab.replay",
            {"fastapi", "pydantic", "vllm"},
        ),
        ("ultraep_serve, ultraep_serve.cli.serve, ultraep_serve.sidecar.app", {"ultraep_lab"}),
        (
            "ultraep_lab.bench.prefill, ultraep_lab.bench.greedy_tokens, ultraep_lab.demo.report",
            {"torch"},
        ),
        (
            "ultraep_serve.doctor as of; of.diagnose(of.Subject())",
            {"vllm", "sglang", "fastapi", "rich"},
        ),
    ],
    ids=["sidecar", "ring", "core", "lab", "client", "doctor"],
)
def test_what_is_not_needed_is_not_imported(modules: str, unwanted: set[str]) -> None:
    code = f"import sys, {modules}; sys.exit(str({unwanted!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "set()"


def test_it_serves_with_a_token_of_its_own_and_stops_when_asked(tmp_path: Path) -> None:
    port = free_port()
    process = start(tmp_path, port)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(f"{url}/healthz") == 200)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 10  # cores are the engine's
        token = (tmp_path / "token").read_text()
        bearer = {"Authorization": f"Bearer {token}"}
        body = {"policy": "off"}
        answer = httpx.post(f"{url}/v1/control/policy", json=body, headers=bearer)
        assert answer.status_code == 409  # accepted, but there is no engine
        assert httpx.post(f"{url}/v1/control/policy", json=body).status_code == 401
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
    assert f"http://127.0.0.1:{port}" in errors
    assert token not in errors
    assert "Traceback" not in errors


def test_an_address_that_cannot_be_served_on_says_which_part_of_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for host, port, wrong in (
            ("192.0.2.1", 0, "host"),
            ("127.0.0.1", other.getsockname()[1], "port"),
        ):
            with pytest.raises(ConfigError, match=f"choose another --{wrong}$"):
                serve(tmp_path, SidecarSettings(host=host, port=port), "t" * 32)


def test_other_hosts_need_a_token(tmp_path: Path) -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.evil", "example.invalid"):
        with pytest.raises(ConfigError, match="token"):
            serve(tmp_path, SidecarSettings(host=host, port=0))


def test_the_token_is_the_operators_or_made_once_and_kept_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as chosen:
        chosen.setenv(TOKEN_VARIABLE, "chosen")
        assert control_token(tmp_path) == "chosen"
    assert os.listdir(tmp_path) == []
    token = control_token(tmp_path)
    assert len(token) >= 32
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["token"]
    assert control_token(tmp_path) == token


PARENT = """
import os, subprocess, sys
from pathlib import Path
from ultraep_serve.telemetry import run_directory
SIDECAR = '''
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from ultraep_serve.cli import main
from ultraep_serve.telemetry import run_directory
run_directory.SHARED_MEMORY = Path(sys.argv[1])
sys.exit(main(["sidecar", *sys.argv[2:]]))
'''
run_directory.SHARED_MEMORY = Path(sys.argv[1])
run = run_directory.RunDirectory.create("0f")
words = [sys.argv[1], "--parent", str(os.getpid()), "--port", sys.argv[2]]
words += ["--run-dir", str(run.path)]
child = subprocess.Popen([sys.executable, "-c", SIDECAR, *words])
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_its_parent_and_removes_the_run_when_all_ranks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    port = free_port()
    with parent_of_a_sidecar(tmp_path, port) as (parent, child, log):
        until(lambda: status(f"http://127.0.0.1:{port}/readyz") == 503)
        assert len(list(tmp_path.iterdir())) == 1
        other = run_directory.RunDirectory.join("0f")  # another rank
        os.kill(int(child.name), signal.SIGHUP)  # the terminal is closed
        said = log.read_text()
        parent.kill()
    until(lambda: status(f"http://127.0.0.1:{port}/readyz") == 0)
    assert len(list(tmp_path.iterdir())) == 1
    os.close(other._lock)  # as when it is killed, too
    other._lock = -1
    until(lambda: has_ended(child))
    assert list(tmp_path.iterdir()) == []
    assert log.read_text() == said  # the engine's reason is the last line


def test_it_says_nothing_where_its_parent_has_ended_before_it_came_up(tmp_path: Path) -> None:
    with parent_of_a_sidecar(tmp_path, free_port()) as (parent, child, log):
        (run,) = tmp_path.iterdir()
        shutil.rmtree(run)
        parent.kill()
    until(lambda: has_ended(child))
    assert log.read_text() == ""


def has_ended(process: Path) -> bool:
    return not process.exists() or b") Z " in (process / "stat").read_bytes()


@contextmanager
def parent_of_a_sidecar(
    shared_memory: Path, port: int
) -> Iterator[tuple["subprocess.Popen[str]", Path, Path]]:
    """A process, its sidecar in /proc, and a file with what that one says."""
    words = [sys.executable, "-c", PARENT, str(shared_memory), str(port)]
    pipe, log = subprocess.PIPE, shared_memory.with_name(f"log-{port}")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as parent,
    ):
        assert parent.stdout is not None
        yield parent, Path(f"/proc/{parent.stdout.readline().strip()}"), log
