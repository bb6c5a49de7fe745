"""A balanced server as users start it, and what demo, benchmarks and tests do with it."""

import random
import sys
from contextlib import closing
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ultraep_lab.bench.engine import Server, ServerWithoutEP
from ultraep_lab.bench.greedy_tokens import (
    Generation,
    TokenComparison,
    compare_tokens,
    generate,
)
from ultraep_lab.bench.prefill import PrefillOptions, Servers
from ultraep_lab.bench.prefill_report import measure_with_progress, prefill_document
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.server_process import ServerProcess
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.control_token import read_token
from ultraep_serve.system.machine import free_port
from ultraep_serve.telemetry.run_directory import run_directory_of_port
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

__all__ = [
    "BalancedServer",
    "check_tokens",
    "expert_parallel_flags",
    "generate_under",
    "installed_engine",
    "measure_server",
    "mixed_prompts",
    "tensor_parallel_flags",
]

_SHORTEST, _LONGEST = 16, 1500  # tokens; from decode-sized to several times min_batch_tokens


class BalancedServer(ServerProcess):
    """`ultraep-serve ENGINE MODEL FLAGS` on free ports."""

    @cached_property
    def sidecar_port(self) -> int:
        """Of its sidecar."""
        return free_port()

    @cached_property
    def sidecar_url(self) -> str:
        """Where its sidecar answers."""
        return f"http://127.0.0.1:{self.sidecar_port}"

    @property
    def token(self) -> str:
        """Bearer token of the sidecar's control endpoint."""
        return read_token(RunFiles(self.run_path).token)

    @property
    def run_path(self) -> Path:
        """Its run directory."""
        return run_directory_of_port(self.port)

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on."""
        with closing(Sidecar(self.sidecar_url, self.token)) as sidecar:
            sidecar.set_policy(policy)

    def _command(self) -> list[str]:
        ports = ["--port", str(self.port), "--sidecar-port", str(self.sidecar_port)]
        return [
            *(sys.executable, "-m", "ultraep_serve.cli", self._engine, self.model),
            *self._flags,
            *ports,
        ]


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
    mode: str, dtype: str, max_tokens: int, engine: str = "vllm", prefix_cache: bool = False
) -> list[str]:
    """``engine``'s flags for two expert-parallel ranks, ``mode`` "tensor" or (vLLM) "data".

    ``prefix_cache``: whether prompts may be found in the engine's cache.

    Raises ConfigError for a mode that the engine's adapter does not have.
    """
    if engine == "sglang":
        if mode != "tensor":
            raise ConfigError(f"{mode} parallelism is not supported with SGLang; use tensor")
        flags = tensor_parallel_flags(dtype, max_tokens, engine, prefix_cache)
        return ["--ep-size", "2", *flags]
    ranks = [f"--{mode}-parallel-size", "2", "--enable-expert-parallel"]
    return [*ranks, *_common_flags(dtype, max_tokens, engine, prefix_cache)]


def tensor_parallel_flags(
    dtype: str, max_tokens: int, engine: str = "vllm", prefix_cache: bool = False
) -> list[str]:
    """``engine``'s flags for two ranks without expert parallelism: each has half of every expert.

    This is what such a machine would serve with if there were no balancing.
    """
    flag = "--tp-size" if engine == "sglang" else "--tensor-parallel-size"
    return [flag, "2", *_common_flags(dtype, max_tokens, engine, prefix_cache)]


def _common_flags(dtype: str, max_tokens: int, engine: str, prefix_cache: bool) -> list[str]:
    """An idle SGLang leaves its cores to other servers."""
    without_cache = "--disable-radix-cache" if engine == "sglang" else "--no-enable-prefix-caching"
    own = ["--sleep-on-idle", "--context-length"] if engine == "sglang" else ["--max-model-len"]
    return [*([] if prefix_cache else [without_cache]), *own, str(max_tokens), "--dtype", dtype]


def measure_server(
    server: BalancedServer,
    without_ep: ServerProcess,
    options: PrefillOptions,
    command: str,
    model: str = "",
) -> dict[str, Any]:
    """``bench prefill`` of both on the words of a made-up domain; the document names ``model``."""
    with (
        closing(Server(server.url)) as balanced,
        closing(Sidecar(server.sidecar_url, server.token)) as sidecar,
        closing(ServerWithoutEP(without_ep.url)) as plain,
    ):
        servers = Servers(balanced, sidecar, plain)
        result = measure_with_progress(servers, partial(sample_text, DOMAINS[0]), options)
        return prefill_document(result, servers, command, model)


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
