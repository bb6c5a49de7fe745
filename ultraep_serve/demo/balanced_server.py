"""A balanced server as users start it, and what demo, benchmarks and tests do with it."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from ultraep_serve.client.engine import Server
from ultraep_serve.client.greedy_tokens import Generation, TokenComparison, compare_tokens, generate
from ultraep_serve.client.prefill import PrefillOptions
from ultraep_serve.client.prefill_report import measure_with_progress, prefill_document
from ultraep_serve.client.sidecar import Sidecar
from ultraep_serve.control_token import read_token
from ultraep_serve.demo.text import DOMAINS, sample_text
from ultraep_serve.errors import ConfigError, ServerError
from ultraep_serve.machine import free_port
from ultraep_serve.ring.run_directory import TOKEN_FILE, run_directory_of_port
from ultraep_serve.types import Policy

__all__ = [
    "BalancedServer",
    "check_tokens",
    "expert_parallel_flags",
    "generate_under",
    "installed_engine",
    "measure_server",
    "mixed_prompts",
]

_START_SECONDS, _STOP_SECONDS = 300.0, 60.0
_SHORTEST, _LONGEST = 16, 1500  # tokens; from decode-sized to several times min_batch_tokens


class BalancedServer:
    """`ultraep-serve ENGINE MODEL FLAGS` on free ports; a context manager that stops it."""

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
        self.port, self.sidecar_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.sidecar_url = f"http://127.0.0.1:{self.sidecar_port}"
        self.log_path = log_path
        self._flags = flags
        self._serves = serves
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def token(self) -> str:
        """Bearer token of the sidecar's control endpoint."""
        return read_token(self.run_path / TOKEN_FILE)

    @property
    def run_path(self) -> Path:
        """Its run directory."""
        return run_directory_of_port(self.port)

    @property
    def process_id(self) -> int:
        """The command's process, ancestor of the engine's and the sidecar's."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "BalancedServer":
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=subprocess.STDOUT, env=self._environment()
            )
        try:
            if self._serves:
                self._wait_until_healthy()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on."""
        with closing(Sidecar(self.sidecar_url, self.token)) as sidecar:
            sidecar.set_policy(policy)

    def wait(self, seconds: float) -> int:
        """Exit code of the command, once it ends by itself. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(seconds)

    def _command(self) -> list[str]:
        ports = ["--port", str(self.port), "--sidecar-port", str(self.sidecar_port)]
        return [
            *(sys.executable, "-m", "ultraep_serve.cli", self._engine, self.model),
            *self._flags,
            *ports,
        ]

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
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def installed_engine() -> str:
    """The engine of this environment, "vllm" or "sglang". Raises ConfigError without one."""
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
            raise ConfigError(f"{mode} parallelism is not supported with SGLang; use tensor")
        ranks = ["--tp-size", "2", "--ep-size", "2", "--disable-radix-cache"]
        return [*ranks, "--dtype", dtype, "--context-length", context]
    ranks = [f"--{mode}-parallel-size", "2", "--enable-expert-parallel"]
    return [*ranks, "--no-enable-prefix-caching", "--dtype", dtype, "--max-model-len", context]


def measure_server(
    server: BalancedServer, options: PrefillOptions, command: str, model: str = ""
) -> dict[str, Any]:
    """``bench prefill`` on the words of a made-up domain; the document names ``model``."""
    with (
        closing(Server(server.url)) as engine,
        closing(Sidecar(server.sidecar_url, server.token)) as sidecar,
    ):
        source = partial(sample_text, DOMAINS[0])
        result = measure_with_progress(engine, sidecar, source, options)
        return prefill_document(result, engine.url, model or engine.model, command)


def mixed_prompts(count: int) -> list[str]:
    """``count`` texts of mixed lengths, from the domains in turn."""
    chooser = random.Random(0)
    return [
        sample_text(DOMAINS[i % len(DOMAINS)], chooser.randint(_SHORTEST, _LONGEST), seed=i)
        for i in range(count)
    ]


def generate_under(
    server: BalancedServer,
    policy: Policy,
    prompts: list[str],
    max_tokens: int = 16,
    concurrency: int = 4,
) -> list[Generation]:
    """Greedy completions of ``prompts`` with ``policy`` in force."""
    server.set_policy(policy)
    return generate(server.url, server.model, prompts, max_tokens, concurrency)


def check_tokens(
    server: BalancedServer, prompts: list[str], concurrency: int = 4
) -> TokenComparison:
    """Compare greedy tokens with balancing off against on, in one running server."""
    policies = (Policy.OFF, Policy.QUOTA)
    off, on = (generate_under(server, each, prompts, concurrency=concurrency) for each in policies)
    return compare_tokens(off, on)
