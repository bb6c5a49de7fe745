"""`ultraep-serve demo`: what balancing does, on this machine, in a few minutes."""

import argparse
import functools
from contextlib import closing
from pathlib import Path
from typing import Any

from ultraep_serve.cli.arguments import prompt_lengths, require_packages
from ultraep_serve.cli.bench import measure_with_progress

__all__ = ["add_parser", "run"]

_DOMAIN = "law"
_CONTEXT = 16384
_CHECKED_PROMPTS = 64
OUTPUTS = {"vllm": "demo.json", "sglang": "demo-sglang.json"}


def add_parser(subparsers: Any) -> None:
    """Add `demo` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "demo",
        help="make a model, serve it on two ranks, and measure what balancing does",
        description="Make a small Mixture-of-Experts model with skewed routing, serve it with the "
        "engine installed here on two expert-parallel ranks, measure time to first token under "
        "every policy, and check that greedy tokens stay the same. No downloads.",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="where files go")
    parser.add_argument("--prompt-tokens", default="2048,4096,8192", help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds per length")
    parser.add_argument(
        "--mode", choices=("tensor", "data"), default="tensor", help="how ranks share the work"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make, serve, measure, check, report. Raises UltraEPError with what to do."""
    require_packages("httpx", "rich")
    from rich.console import Console

    from ultraep_serve.demo.balanced_server import installed_engine
    from ultraep_serve.demo.report import demo_report, demo_view
    from ultraep_serve.files import prepare_output, write_json

    console = Console()
    engine = installed_engine()
    output = arguments.results / OUTPUTS[engine]
    prepare_output(output)
    console.print("Making a model whose router favours few experts ...")
    model = _model(arguments.results / "models" / "demo")
    console.print(
        f"Serving it with {engine} in bfloat16 on two ranks ({arguments.mode} parallel) ..."
    )
    bench = _measure(model, engine, arguments)
    console.print("Serving it in float32 to compare greedy tokens ...")
    check = _check(model, engine, arguments)
    report = demo_report(bench, check)
    write_json(output, report)
    console.print(demo_view(report))
    console.print(f"Written to {output}; the servers' logs are beside it.")
    return 0


def _model(path: Path) -> Path:
    from ultraep_serve.demo.models import make_model
    from ultraep_serve.demo.spec import demo_qwen3

    if not (path / "model.safetensors").exists():
        make_model(path, demo_qwen3())
    return path


def _measure(model: Path, engine: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from ultraep_serve.client.engine import Server
    from ultraep_serve.client.prefill import PrefillOptions
    from ultraep_serve.client.prefill_report import prefill_document
    from ultraep_serve.client.sidecar import Sidecar
    from ultraep_serve.demo.balanced_server import BalancedServer, expert_parallel_flags
    from ultraep_serve.demo.text import sample_text

    options = PrefillOptions(
        prompt_tokens=prompt_lengths(arguments.prompt_tokens),
        repeats=arguments.repeats,
    )
    flags = [*expert_parallel_flags(arguments.mode, "bfloat16", _CONTEXT, engine), "--allow-ideal"]
    log = arguments.results / "demo-bfloat16.log"
    with (
        BalancedServer(model, flags, log, engine=engine) as running,
        closing(Server(running.url)) as server,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        source = functools.partial(sample_text, _DOMAIN)
        result = measure_with_progress(server, sidecar, source, options)
        return prefill_document(result, server.url, server.model, "ultraep-serve demo")


def _check(model: Path, engine: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from ultraep_serve.demo.balanced_server import BalancedServer, expert_parallel_flags
    from ultraep_serve.demo.same_tokens import check_tokens, mixed_prompts

    flags = expert_parallel_flags(arguments.mode, "float32", _CONTEXT, engine)
    log = arguments.results / "demo-float32.log"
    with BalancedServer(model, flags, log, engine=engine) as running:
        return check_tokens(running, mixed_prompts(_CHECKED_PROMPTS)).to_json("float32")
