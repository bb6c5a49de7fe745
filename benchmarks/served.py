"""The models that servers are measured with, and such a server, two ranks on this machine."""

import argparse
from pathlib import Path

from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    expert_parallel_flags,
    installed_engine,
)
from ultraep_lab.demo.models import make_model
from ultraep_lab.demo.spec import ModelSpec

WORK = Path("results")  # models and logs
_CONTEXT = 16384  # tokens
_MODELS = {
    "qwen3": ModelSpec(),
    "balanced": ModelSpec(imbalance=1.0),
}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """What ``serve`` reads of a command line; the engine is this environment's."""
    parser.add_argument("--model", choices=sorted(_MODELS), default="qwen3")
    parser.add_argument("--mode", choices=("tensor", "data"), default="tensor")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--slot-memory", default="auto", help="auto, per_layer or shared")


def model(name: str) -> Path:
    """The named model, made on first use."""
    path = WORK / "models" / name
    if not (path / "model.safetensors").exists():
        make_model(path, _MODELS[name])
    return path


def serve(options: argparse.Namespace, path: Path, dtype: str, *extra: str) -> BalancedServer:
    """A server for ``path`` under the benchmark's options."""
    engine = installed_engine()
    flags = expert_parallel_flags(options.mode, dtype, _CONTEXT, engine)
    flags += ["--slot-memory", options.slot_memory, *extra]
    flags += ["--enforce-eager"] if options.eager else []
    return BalancedServer(path, flags, WORK / "serving.log", engine=engine)
