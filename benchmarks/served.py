"""The models that servers are measured with, and such a server, two ranks on this machine."""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    expert_parallel_flags,
    tensor_parallel_flags,
)
from ultraep_lab.demo.models import make_model
from ultraep_lab.demo.server_process import StockServer
from ultraep_lab.demo.spec import ModelSpec
from ultraep_serve.system.machine import free_port
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray

WORK = Path("results")  # models and logs
CONTEXT = 16384  # tokens
START_SECONDS = 60.0
_BEHIND_SECONDS = 0.05
MODELS = {
    "qwen3": ModelSpec(),
    "glm4": ModelSpec(architecture="glm4_moe"),
    "balanced": ModelSpec(imbalance=1.0),
}


def model(name: str) -> Path:
    """The named model, made on first use."""
    path = WORK / "models" / name
    if not (path / "model.safetensors").exists():
        make_model(path, MODELS[name])
    return path


def serve(
    options: argparse.Namespace, path: Path, dtype: str, *extra: str, prefix_cache: bool = False
) -> BalancedServer:
    """A server for ``path`` under the benchmark's options."""
    flags = expert_parallel_flags(options.mode, dtype, CONTEXT, options.engine, prefix_cache)
    flags = [*flags, *extra]
    flags += ["--enforce-eager"] if options.eager else []
    return BalancedServer(path, flags, WORK / "serving.log", engine=options.engine)


def serve_without_ep(
    options: argparse.Namespace, path: Path, dtype: str, *extra: str, prefix_cache: bool = False
) -> StockServer:
    """The engine alone under the same options, tensor-parallel. Start it first: see ``demo``."""
    flags = tensor_parallel_flags(dtype, CONTEXT, options.engine, prefix_cache)
    flags = [*flags, *extra]
    flags += ["--enforce-eager"] if options.eager else []
    return StockServer(path, flags, WORK / "serving-without-ep.log", options.engine)


@contextmanager
def sidecar(run_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A sidecar over ``run_dir``, once every rank is ready: its process and address."""
    port = free_port()
    command = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", str(run_dir)]
    process = subprocess.Popen([*command, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(url):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not every rank was ready within {START_SECONDS:g} s")
            time.sleep(0.2)
        yield process, url
    finally:
        process.terminate()
        process.wait()


def new_records(readers: list[RingReader]) -> list[RecordArray]:
    """What ranks have recorded since the last call, some milliseconds behind their answers."""
    time.sleep(_BEHIND_SECONDS)
    return [reader.poll().records for reader in readers]


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False  # not listening yet
