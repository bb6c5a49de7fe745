"""A balanced server as users start it, and what demo, benchmarks and tests do with it."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import httpx

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.greedy_tokens import (
    Generation,
    TokenComparison,
    compare_tokens,
    generate,
)
from ultraep_lab.bench.prefill import PrefillOptions
from ultraep_lab.bench.prefill_report import measure_with_progress, prefill_document
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_lab.errors import ServerError
from ultraep_lab.progress import Progress
from ultraep_lab.this_machine import free_port
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_token
from ultraep_serve.telemetry.run_directory import find_run
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

Self = TypeVar("Self", bound="BalancedServer")
_STOP_SECONDS, _GROUP_SECONDS = 60.0, 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHORTEST = 16  # tokens of a prompt, as few as a decode batch has


class BalancedServer:
    """`ultraep-serve ENGINE MODEL FLAGS` on free ports, as a process of its own.

    A context manager that starts it, and stops it and its children. It also ends when this process
    is killed.
    """

    start_seconds = 300.0  # at most

    def __init__(
        self,
        model: Path,
        flags: Sequence[str],
        log_path: Path,
        engine: str = "vllm",
        serves: bool = True,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """``serves`` is False for a host that has ranks but no server to wait for.

        ``on_wait`` is called twice a second until it is ready.
        """
        self.model = str(model)
        self.port, self.sidecar_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.sidecar_url = f"http://127.0.0.1:{self.sidecar_port}"
        self.log_path = log_path
        self._engine, self._flags = engine, flags
        self._serves, self._on_wait = serves, on_wait
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        """The command's process, ancestor of all others."""
        assert self._process is not None
        return self._process.pid

    @property
    def token(self) -> str:
        """Bearer token of the sidecar's control endpoint."""
        return read_token(RunFiles(self.run_path).token)

    @property
    def run_path(self) -> Path:
        """Its run directory."""
        return find_run(port=self.port)

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on."""
        with closing(Sidecar(self.sidecar_url, self.token)) as sidecar:
            sidecar.set_policy(policy)

    def __enter__(self: Self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdout=log,
                stderr=log,
                preexec_fn=_before_it_runs,
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

    def wait(self, seconds: float) -> int:
        """Exit code of the command, once it ends by itself. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(seconds)

    def _command(self) -> list[str]:
        ports = ["--port", str(self.port), "--sidecar-port", str(self.sidecar_port)]
        ours = [sys.executable, "-m", "ultraep_serve.cli", self._engine, self.model]
        return [*ours, *self._flags, *ports]

    def _environment(self) -> dict[str, str] | None:
        """Of the command; None: that of this process."""
        return None

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended at start-up:\n{self._log_tail()}")
            with suppress(httpx.TransportError):  # not listening yet
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            self._on_wait()
            time.sleep(0.5)
        raise ServerError(f"no answer after {self.start_seconds:g} s:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])

    def _stop(self) -> None:
        """Terminate it, after some time kill it, and whatever it started."""
        assert self._process is not None
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
                time.sleep(_GROUP_SECONDS)  # to remove its own shared memory
        self._process.wait()


def _before_it_runs() -> None:
    """A group of its own, without the terminal's signals; it ends with this process.

    It stays in this session: Linux may share cores out by session (``sched_autogroup_enabled``).
    """
    os.setpgrp()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def installed_engine() -> str:
    """The engine of this environment, "vllm" or "sglang". Raises ConfigError without one."""
    for engine in ("vllm", "sglang"):
        if find_spec(engine) is not None:
            return engine
    raise ConfigError(
        "no engine is installed here; pip install '.[vllm]' or '.[sglang]' in a checkout, or for "
        "CPU run deploy/setup_vllm_cpu.py or deploy/setup_sglang_cpu.py"
    )


def expert_parallel_flags(
    mode: str, dtype: str, max_tokens: int, engine: str = "vllm", prefix_cache: bool = False
) -> list[str]:
    """``engine``'s flags for two expert-parallel ranks, ``mode`` "tensor" or (vLLM) "data".

    ``prefix_cache``: whether prompts may be found in the engine's cache.

    Raises ConfigError for a mode that the engine's adapter does not have.
    """
    if engine == "sglang":
        if mode != "tensor":
            raise ConfigError(f"{mode} parallelism is not supported with SGLang; use tensor")
        own = [] if prefix_cache else ["--disable-radix-cache"]
        own += ["--ep-size", "2", "--tp-size", "2", "--context-length", str(max_tokens)]
    else:
        own = [] if prefix_cache else ["--no-enable-prefix-caching"]
        own += [f"--{mode}-parallel-size", "2", "--enable-expert-parallel"]
        own += ["--max-model-len", str(max_tokens)]
    return [*own, "--dtype", dtype]


def measure_server(
    server: BalancedServer,
    options: PrefillOptions,
    command: str,
    model: str = "",
    progress: Progress | None = None,
    seconds_after: float = 0.0,
) -> dict[str, Any]:
    """``bench prefill`` on the words of a made-up domain; the document names ``model``.

    ``progress`` may know how many ``seconds_after`` it something else takes.
    """
    with (
        closing(Server(server.url)) as balanced,
        closing(Sidecar(server.sidecar_url, server.token)) as sidecar,
    ):
        source = partial(sample_text, DOMAINS[0])
        told = progress or Progress()
        result = measure_with_progress(balanced, sidecar, source, options, told, seconds_after)
        return prefill_document(result, balanced, command, model)


def mixed_prompts(count: int, longest: int = 1500) -> list[str]:
    """``count`` texts of mixed lengths, up to ``longest`` tokens, from the domains in turn."""
    chooser = random.Random(0)
    return [
        sample_text(DOMAINS[i % len(DOMAINS)], chooser.randint(_SHORTEST, longest), seed=i)
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
