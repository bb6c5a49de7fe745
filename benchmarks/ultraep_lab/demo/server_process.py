"""An engine's server as a process of its own; what a balanced and a stock server have in common."""

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import httpx

from ultraep_serve.errors import ServerError
from ultraep_serve.launcher.supervisor import EngineCommand, start_child, stop_child
from ultraep_serve.system.environment import child_environment
from ultraep_serve.system.machine import free_port
from ultraep_serve.types import Policy

__all__ = ["ServerProcess", "StockServer"]

Self = TypeVar("Self", bound="ServerProcess")
_START_SECONDS, _STOP_SECONDS = 300.0, 60.0


class ServerProcess:
    """A server on a free port; a context manager that starts it, and stops it and its children.

    It also ends when this process is killed. Subclasses say what to run.
    """

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log_path: Path,
        engine: str = "vllm",
        serves: bool = True,
    ) -> None:
        """``serves`` is False for a host that has ranks but no server to wait for."""
        self._engine = engine
        self.model = str(model)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._flags = flags
        self._serves = serves
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        """The command's process, ancestor of all others."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self: Self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = start_child(self._command(), self._environment(), log)
        try:
            if self._serves:
                self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def wait(self, seconds: float) -> int:
        """Exit code of the command, once it ends by itself. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(seconds)

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str] | None:
        """Of the command; None: as this process's."""
        return None

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended at start-up:\n{self._log_tail()}")
            with suppress(httpx.TransportError):  # not listening yet
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            time.sleep(0.5)
        raise ServerError(f"no answer after {_START_SECONDS:g} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])

    def _stop(self) -> None:
        assert self._process is not None
        stop_child(self._process, _STOP_SECONDS)


class StockServer(ServerProcess):
    """The engine's own server, where balancing is not switched on: what users have without us."""

    def _command(self) -> list[str]:
        return self._engine_command().arguments

    def _environment(self) -> dict[str, str]:
        return child_environment(None, self._engine_command().environment)

    def _engine_command(self) -> EngineCommand:
        """As ``ultraep-serve ENGINE --policy off`` would run it, with what a CPU machine needs."""
        launch = import_module(f"ultraep_serve.engines.{self._engine}.launch")
        flags = [*self._flags, "--port", str(self.port)]
        command: EngineCommand = launch.engine_command(self.model, flags, Policy.OFF)
        return command
