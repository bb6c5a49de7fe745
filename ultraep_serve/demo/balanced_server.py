"""A balanced server as a user starts it, for demos, benchmarks and tests."""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import httpx

from ultraep_serve.errors import ConfigError, ServerError
from ultraep_serve.launcher.run_directory import TOKEN_FILE, run_directory_of_port
from ultraep_serve.machine import free_port

__all__ = [
    "BalancedServer",
    "expert_parallel_flags",
    "installed_engine",
]

_STOP_SECONDS = 60.0


class BalancedServer:
    """`ultraep-serve ENGINE MODEL FLAGS` on free ports; a context manager that stops it."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log_path: Path,
        start_seconds: float = 300.0,
        engine: str = "vllm",
        serves: bool = True,
    ) -> None:
        """``serves`` is False for a host that has ranks and no server: nothing waits for it."""
        self._engine = engine
        self.model = str(model)
        self.port, self.sidecar_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.sidecar_url = f"http://127.0.0.1:{self.sidecar_port}"
        self.log_path = log_path
        self._flags = [*flags, "--port", str(self.port), "--sidecar-port", str(self.sidecar_port)]
        self._start_seconds = start_seconds
        self._serves = serves
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def token(self) -> str:
        """Bearer token of the sidecar's control endpoint."""
        return (run_directory_of_port(self.port) / TOKEN_FILE).read_text().strip()

    @property
    def process_id(self) -> int:
        """The command's process, ancestor of the engine's and the sidecar's."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "BalancedServer":
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "ultraep_serve.cli",
            self._engine,
            self.model,
            *self._flags,
        ]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            if self._serves:
                self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def wait(self, seconds: float) -> int:
        """Exit code of the command, once it ends by itself. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(seconds)

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended at start-up:\n{self._log_tail()}")
            with suppress(httpx.TransportError):  # not listening yet
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            time.sleep(0.5)
        raise ServerError(f"no answer after {self._start_seconds:g} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])

    def _stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def installed_engine() -> str:
    """The engine of this environment, "vllm" or "sglang"; raises ConfigError without one."""
    for engine in ("vllm", "sglang"):
        if find_spec(engine) is not None:
            return engine
    raise ConfigError(
        "no engine is installed here; pip install 'ultraep-serve[vllm]' or '[sglang]', or for CPU "
        "run deploy/setup_vllm_cpu.py or deploy/setup_sglang_cpu.py"
    )


def expert_parallel_flags(
    mode: str, dtype: str, max_tokens: int, engine: str = "vllm"
) -> list[str]:
    """``engine``'s flags for two expert-parallel ranks, ``mode`` "tensor" or (vLLM) "data".

    Raises ConfigError for a mode that the engine's adapter does not have.
    """
    context = str(max_tokens)
    if engine == "sglang":
        if mode != "tensor":
            raise ConfigError(f"{mode} parallelism is not there yet for SGLang; use tensor")
        ranks = ["--tp-size", "2", "--ep-size", "2", "--disable-radix-cache"]
        return [*ranks, "--dtype", dtype, "--context-length", context]
    ranks = [f"--{mode}-parallel-size", "2", "--enable-expert-parallel"]
    return [*ranks, "--no-enable-prefix-caching", "--dtype", dtype, "--max-model-len", context]
