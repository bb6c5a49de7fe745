"""One fault in one stage of a run: a sidecar, and a server and ranks that stand in for an engine.

What is seen is a word: ``on``, the ranks' batches go on; ``told``, they go on and the sidecar's
readiness says what is wrong; ``waits``, nothing goes on until a stopped
process does, and then all is as it was asked; ``ends``, every process has ended. Anything else is a
failure: ``hangs`` (neither ends nor goes on), or ``leaves`` and what was left behind.
"""

import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.faults.engine import run_path
from tests.support.waiting import until
from ultraep_lab.this_machine import free_port
from ultraep_serve.errors import ControlError, RingError
from ultraep_serve.system.listeners import listening_processes
from ultraep_serve.system.topology import is_process_alive
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

STAGES = ("start", "load", "serve", "policy switch", "stop")
PROCESSES = ("sidecar", "server", "rank")
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGHUP", "SIGSTOP")
_ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS, _SETTLED_SECONDS, _GONE_SECONDS = 25.0, 5.0, 40.0


class Fault(NamedTuple):
    """What fails how, and when."""

    what: str  # a process, a file, or the like
    how: str
    stage: str


class _Run:
    """The processes, by name, and the board by which they are led through the stages."""

    def __init__(self, folder: Path, server: subprocess.Popen[bytes], port: int) -> None:
        self.board = folder / "board"
        self._reader: RingReader | None = None
        self.server, self._sidecar_port = server, port
        self.sidecar_url = f"http://127.0.0.1:{port}"
        self.files = RunFiles(run_path(server.pid))
        self.processes = {"server": server.pid}

    def reach(self, stage: str) -> None:
        """Go on until ``stage`` has begun."""
        until((self.board / "starting").exists, 60)
        if stage == "start":
            return
        self.allow("start")
        until((self.board / "loading-1").exists, 60)
        until((self.board / "loading-0").exists, 60)
        self.note_ranks()
        self.batches()
        until(lambda: bool(listening_processes(self._sidecar_port)), 60)
        (self.processes["sidecar"],) = listening_processes(self._sidecar_port)
        if stage == "load":
            return
        self.allow("load")
        until(lambda: self.readiness() == 200, 60)
        if stage == "stop":
            self.server.terminate()
            until((self.board / "stopping").exists, 60)

    def note_ranks(self) -> None:
        for rank in range(2):
            with suppress(OSError, ValueError):
                self.processes[f"rank {rank}"] = int((self.board / f"loading-{rank}").read_text())

    def allow(self, *stages: str) -> None:
        for stage in stages:
            (self.board / f"may-{stage}").touch()

    def readiness(self) -> int:
        """The status of /readyz; 0 without an answer."""
        try:
            return httpx.get(f"{self.sidecar_url}/readyz", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def alive(self) -> list[str]:
        self.note_ranks()
        self.server.poll()
        return [name for name, number in self.processes.items() if is_process_alive(number)]

    def left(self) -> list[str]:
        """Processes and files that are still there."""
        return self.alive() + [str(self.files.path)] * self.files.path.exists()

    def batches(self) -> int:
        """How many rank 0 has counted; -1 where its ring cannot be read.

        It is read on where somebody deletes it.
        """
        with suppress(RingError):
            self._reader = self._reader or RingReader(self.files.ring(0))
            return self._reader.header().batches
        return -1


@contextmanager
def _running(folder: Path) -> Iterator[_Run]:
    (folder / "board").mkdir(parents=True)
    port = free_port()
    paths = [str(_ROOT / folder) for folder in ("", "kernels", "benchmarks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.engine", str(folder / "board"), str(port)],
            cwd=_ROOT, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    run = _Run(folder, server, port)
    try:
        yield run
    finally:
        for name in run.alive():
            with suppress(ProcessLookupError):
                os.kill(run.processes[name], signal.SIGKILL)
        server.wait(timeout=60)
        shutil.rmtree(run.files.path, ignore_errors=True)


def inject(fault: Fault, folder: Path) -> str:
    """What is seen of a run in ``folder`` (in shared memory) when ``fault`` strikes it."""
    with _running(folder) as run, ExitStack() as stack:
        run.reach(fault.stage)
        if fault.stage == "policy switch":
            stack.enter_context(_policies_change(run))
        stack.enter_context(_struck(run, fault))
        run.allow("start", "load", "end")
        seen = _observe(run, fault)
        stack.close()
        if seen == "hangs" and fault.how == "SIGSTOP":
            seen = "waits"
        if seen != "ends" and run.server.poll() is None:
            run.server.terminate()
        try:
            until(lambda: not run.left(), _GONE_SECONDS)
        except AssertionError:
            return f"leaves {', '.join(run.left())}" if seen != "hangs" else seen
        return seen


def _observe(run: _Run, fault: Fault) -> str:
    deadline = time.monotonic() + _LIMIT_SECONDS
    settled, seen_at = 0.0, -1
    while time.monotonic() < deadline:
        if run.server.poll() is not None:
            return "ends"
        batches = run.batches()
        goes_on, seen_at = batches > seen_at >= 0, batches
        settled = settled + 0.5 if goes_on else 0.0
        if settled >= _SETTLED_SECONDS and fault.stage != "stop":
            is_asked = fault.what == "sidecar" or "sidecar" not in run.alive()
            return "on" if is_asked or _is_ready_soon(run) else "told"
        time.sleep(0.5)
    return "hangs"


def _is_ready_soon(run: _Run) -> bool:
    """The sidecar may still be starting."""
    for _ in range(20):
        if run.readiness() == 200:
            return True
        time.sleep(0.5)
    return False


@contextmanager
def _policies_change(run: _Run) -> Iterator[None]:
    """Ten times a second."""
    over = threading.Event()

    def change() -> None:
        policies = itertools.cycle((Policy.OFF, Policy.QUOTA))
        while not over.wait(0.1):
            with suppress(ControlError), ControlPage.open(run.files.path) as page:
                page.set_policy(next(policies))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _struck(run: _Run, fault: Fault) -> Iterator[None]:
    """The fault; what can end (a stop) ends with the block."""
    what, how = fault.what, fault.how
    if what in PROCESSES:
        process = run.processes["rank 1" if what == "rank" else what]
        if how in SIGNALS:
            os.kill(process, signal.Signals[how])
            yield
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
            return
        _limit(process, how)
    elif what == "run directory":
        subprocess.run(["rm", "-rf", str(run.files.path)], check=True)
    else:
        files = {"ring": run.files.ring(1), "control page": run.files.control}
        files |= {"settings": run.files.settings, "token": run.files.token}
        _damage(files[what], how)
    yield


def _limit(process: int, how: str) -> None:
    """Take from ``process`` what it would need next."""
    status = Path(f"/proc/{process}/status").read_text()
    kind, value = {
        "no memory": (resource.RLIMIT_AS, int(status.split("VmSize:")[1].split()[0]) << 10),
        "no room in files": (resource.RLIMIT_FSIZE, 0),
        "no descriptors": (resource.RLIMIT_NOFILE, 0),
    }[how]
    resource.prlimit(process, kind, (value, value))


def _damage(path: Path, how: str) -> None:
    with suppress(OSError):  # it may not be there yet
        if how == "truncated":
            os.truncate(path, 10)
        elif how == "overwritten":
            with path.open("r+b") as file:
                file.write(b"\xff" * 4096)
        else:
            path.unlink(missing_ok=True)
            if how == "a pipe":
                os.mkfifo(path, 0o600)
