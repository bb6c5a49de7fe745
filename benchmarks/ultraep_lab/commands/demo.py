"""`ultraep-serve demo`: what balancing does, on this machine, in a few minutes."""

import argparse
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console

from ultraep_lab.bench.prefill import PrefillOptions, PromptTokens
from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    check_tokens,
    expert_parallel_flags,
    installed_engine,
    measure_server,
    mixed_prompts,
    tensor_parallel_flags,
)
from ultraep_lab.demo.models import make_model, served_type
from ultraep_lab.demo.report import demo_report, demo_view
from ultraep_lab.demo.server_process import StockServer
from ultraep_lab.demo.spec import ModelSpec
from ultraep_serve.cli.arguments import prepare_outputs
from ultraep_serve.system.files import write_json
from ultraep_serve.system.settings import Directory, Settings
from ultraep_serve.types import Policy

__all__ = ["add_arguments", "run"]

_CONTEXT = 16384
_CHECKED_PROMPTS = 64
_OUTPUTS = {"vllm": "demo.json", "sglang": "demo-sglang.json"}


class DemoFlags(Settings):
    """What to measure, and where results go."""

    results: Directory = Field(
        default=Path("results"),
        description="directory for all files",
    )
    prompt_tokens: PromptTokens = (2048, 4096, 8192)
    repeats: int = Field(default=5, ge=1, description="rounds per length")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None,
        description="type of the numbers that are served (default: bfloat16, or float32 where this "
        "CPU emulates bfloat16)",
    )
    mode: Literal["tensor", "data"] = Field(
        default="tensor", description="parallelism of what is not an expert"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``DemoFlags``."""
    parser.description = (
        "Make a small Mixture-of-Experts model with skewed routing, serve it with the installed "
        "engine on two expert-parallel ranks, measure time to first token under every policy and, "
        "in turn, of the engine alone without expert parallelism, and check that greedy tokens "
        "stay the same. No downloads."
    )
    DemoFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make, serve, measure, check, report. Raises UltraEPError with what to do."""
    flags, console = DemoFlags.from_flags(arguments), Console()
    engine = installed_engine()
    output = flags.results / _OUTPUTS[engine]
    prepare_outputs(output)
    console.print("Making a model whose router favours few experts ...")
    path = flags.results / "models" / "demo"
    if not (path / "model.safetensors").exists():
        make_model(path, ModelSpec())

    def server(dtype: str, *more: str) -> BalancedServer:
        given = (*expert_parallel_flags(flags.mode, dtype, _CONTEXT, engine), *more)
        return BalancedServer(path, given, flags.results / f"demo-{dtype}.log", engine=engine)

    dtype = flags.dtype or served_type()
    console.print(
        f"Serving it with {engine} in {dtype} on two ranks ({flags.mode} parallel), and "
        "beside it without expert parallelism ..."
    )
    policies = (Policy.OFF, Policy.QUOTA, Policy.IDEAL)
    options = PrefillOptions(
        prompt_tokens=flags.prompt_tokens, policies=policies, repeats=flags.repeats
    )
    # The balanced server starts last: it measures costs then, and the other one is idle.
    plain_flags = tensor_parallel_flags(dtype, _CONTEXT, engine)
    log_path = flags.results / "demo-without-ep.log"
    with (
        StockServer(path, plain_flags, log_path, engine) as plain,
        server(dtype, "--allow-ideal") as running,
    ):
        bench = measure_server(running, plain, options, "ultraep-serve demo")
    console.print("Serving it anew in float32 to compare greedy tokens ...")
    with server("float32") as running:
        check = check_tokens(running, mixed_prompts(_CHECKED_PROMPTS)).to_json("float32")
    report = demo_report(bench, check, dtype)
    write_json(output, report)
    console.print(demo_view(report))
    console.print(f"Written to {output}; the servers' logs are beside it.")
    return 0
