"""Launcher, sidecar and engine when one of them is killed or stopped, or its log is full."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launched import SUPERVISOR, answers, is_gone, launched
from tests.support.waiting import until
from ultraep_serve.system.machine import free_port
from ultraep_serve.system.topology import is_process_alive

FATAL = (signal.SIGKILL, signal.SIGSEGV)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, *FATAL])
def test_engine_and_sidecar_end_with_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    waiting = "import time; time.sleep(60)"
    with launched(tmp_path, waiting) as (launcher, sidecar, engine):
        launcher.send_signal(number)
        code = launcher.wait(timeout=40)
    assert code == (-number if number in FATAL else 128 + signal.SIGTERM)
    assert is_gone(engine)
    assert is_gone(sidecar)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        *(("sidecar", number) for number in (*FATAL, signal.SIGSTOP)),
        ("launcher", signal.SIGSTOP),
    ],
)
def test_the_engine_goes_on_without(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    """A launcher that stops goes on later; whatever ends, its exit status is the engine's."""
    code = (
        "import pathlib, time\n"
        f"while not pathlib.Path({str(tmp_path / 'end')!r}).exists(): time.sleep(0.01)\n"
        f"pathlib.Path({str(tmp_path / 'ended')!r}).touch(); raise SystemExit(5)"
    )
    script = SUPERVISOR.replace("config =", "supervisor._STOP_SECONDS = 1.0; config =")
    with launched(tmp_path, code, script) as (launcher, sidecar, engine):
        os.kill(sidecar if victim == "sidecar" else launcher.pid, number)
        time.sleep(0.2)
        assert is_process_alive(engine)
        (tmp_path / "end").touch()
        until((tmp_path / "ended").exists)
        launcher.send_signal(signal.SIGCONT)
        assert launcher.wait(timeout=40) == 5
    assert is_gone(engine)
    assert is_gone(sidecar)


def test_a_stopped_engine_is_waited_for(tmp_path: Path) -> None:
    """The sidecar answers meanwhile."""
    end = tmp_path / "end"
    code = (
        "import pathlib, time\n"
        f"while not pathlib.Path({str(end)!r}).exists(): time.sleep(0.01)\n"
        "raise SystemExit(5)"
    )
    port = free_port()
    script = SUPERVISOR.replace('"--port", "0"', f'"--port", "{port}"')
    with launched(tmp_path, code, script) as (launcher, sidecar, engine):
        os.kill(engine, signal.SIGSTOP)
        end.touch()
        until(lambda: answers(f"http://127.0.0.1:{port}"))
        assert all(map(is_process_alive, (launcher.pid, sidecar, engine)))
        os.kill(engine, signal.SIGCONT)
        assert launcher.wait(timeout=40) == 5
    assert is_gone(sidecar)


def test_a_full_log_does_not_keep_it_from_stopping(tmp_path: Path) -> None:
    waiting = "import time; time.sleep(60)"
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        launched(tmp_path, waiting, log=full) as (launcher, sidecar, engine),
    ):
        launcher.terminate()
        assert launcher.wait(timeout=40) == 128 + signal.SIGTERM
    assert is_gone(engine)
    assert is_gone(sidecar)


@pytest.mark.parametrize("number", FATAL)
def test_a_launcher_killed_while_it_stops_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The engine is in the middle of ending."""
    code = (
        "import pathlib, signal, time\n"
        "def end(*_):\n"
        f"    pathlib.Path({str(tmp_path / 'ends')!r}).touch(); time.sleep(1); exit()\n"
        f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(tmp_path / 'up')!r}).touch()\n"
        "time.sleep(60)"
    )
    with launched(tmp_path, code) as (launcher, sidecar, engine):
        until((tmp_path / "up").exists)
        launcher.terminate()
        until((tmp_path / "ends").exists)
        launcher.send_signal(number)
        launcher.wait(timeout=40)
    assert is_gone(engine)
    assert is_gone(sidecar)


@pytest.mark.parametrize("number", FATAL)
def test_an_engine_killed_while_it_stops_ends_the_sidecar(
    tmp_path: Path, number: signal.Signals
) -> None:
    code = (
        "import os, pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), {int(number)}))\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"
    )
    with launched(tmp_path, code) as (launcher, sidecar, engine):
        until((tmp_path / "up").exists)
        launcher.terminate()
        assert launcher.wait(timeout=40) == 128 + number
    assert is_gone(engine)
    assert is_gone(sidecar)


def test_the_sidecar_ends_with_the_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, "raise SystemExit(5)", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    sidecar, engine = map(int, done.stdout.split()[:2])
    assert done.returncode == 5
    assert is_gone(sidecar)
    assert is_gone(engine)
