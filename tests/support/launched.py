"""A launcher in a process of its own, with a small command in the engine's place."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import httpx

from ultraep_serve.system.topology import is_process_alive

__all__ = ["SUPERVISOR", "answers", "is_gone", "launched"]

SUPERVISOR = """
import sys
from pathlib import Path
from ultraep_serve.config import BalanceConfig
from ultraep_serve.launcher import supervisor
from ultraep_serve.types import Policy
engine_code, run_dir = sys.argv[1:]
Path(run_dir).mkdir(mode=0o700, exist_ok=True)
engine = supervisor.EngineCommand([sys.executable, "-c", engine_code], "http://127.0.0.1:9", 2)
start = supervisor.start_child
def noted(arguments, environment):
    child = start(arguments, environment)
    print(child.pid, flush=True)
    return child
supervisor.start_child = noted
config = BalanceConfig(policy=Policy.OFF, run_dir=run_dir)
sidecar = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", run_dir, "--port", "0"]
raise SystemExit(supervisor.supervise(engine, config, sidecar))
"""


@contextmanager
def launched(
    tmp_path: Path,
    engine_code: str,
    script: str = SUPERVISOR,
    log: FileIO | int = subprocess.DEVNULL,
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A launcher, and the process ids of its sidecar and its engine."""
    with subprocess.Popen(
        [sys.executable, "-c", script, engine_code, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=log,
    ) as launcher:
        assert launcher.stdout is not None
        sidecar, engine = (int(launcher.stdout.readline()) for _ in range(2))
        yield launcher, sidecar, engine


def is_gone(process: int) -> bool:
    """Whether it ends within some seconds (a killed child's parent may have to reap it first)."""
    deadline = time.monotonic() + 10
    while is_process_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def answers(url: str) -> bool:
    """Whether a sidecar is there."""
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False
