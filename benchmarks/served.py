"""The models that servers are measured with, and such a server, two ranks on this machine."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ultraep_serve.demo.balanced_server import BalancedServer, expert_parallel_flags
from ultraep_serve.demo.models import make_model
from ultraep_serve.demo.spec import ModelSpec, demo_balanced, demo_glm4, demo_qwen3

__all__ = ["CONTEXT", "MODELS", "WORK", "model", "serve"]

WORK = Path("results")  # models and logs
CONTEXT = 16384  # tokens
MODELS: dict[str, Callable[[], ModelSpec]] = {
    "qwen3": demo_qwen3,
    "glm4": demo_glm4,
    "balanced": demo_balanced,
}


def model(name: str) -> Path:
    """The named model, made on first use."""
    path = WORK / "models" / name
    if not (path / "model.safetensors").exists():
        make_model(path, MODELS[name]())
    return path


def serve(options: argparse.Namespace, path: Path, dtype: str, *extra: str) -> BalancedServer:
    """A server for ``path`` under the benchmark's options."""
    flags = [*expert_parallel_flags(options.mode, dtype, CONTEXT, options.engine), *extra]
    flags += ["--enforce-eager"] if options.eager else []
    return BalancedServer(path, flags, WORK / "serving.log", engine=options.engine)
