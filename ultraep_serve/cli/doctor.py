"""`ultraep-serve doctor`: what would keep a server from balancing here, and what to do."""

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_serve import __version__
from ultraep_serve.cli import Parser, serve
from ultraep_serve.cli.arguments import add_json_argument, number, prepare_outputs, show
from ultraep_serve.config import BalanceConfig, SidecarSettings, values_of_flags
from ultraep_serve.costs.shapes import WEIGHT_BITS
from ultraep_serve.doctor import diagnose
from ultraep_serve.doctor.finding import Finding, Status, Subject

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add_arguments", "run"]

SCHEMA_VERSION = 1
_MARKS = {
    Status.OK: ("✔", "green"),
    Status.WARNING: ("!", "yellow"),
    Status.ERROR: ("✘", "bold red"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to be served, as single flags or as the command that will serve it."""
    parser.description = (
        "Check what serving with balancing needs, and say how to fix what is missing. Changes "
        "nothing. Exits with 1 when there is an error."
    )
    port = "port of a server that runs, or will run, on this machine"
    parser.add_argument("--port", type=number(1, 65534), metavar="N", help=port)
    sidecar = "its sidecar's port (default: the server's + 1)"
    parser.add_argument("--sidecar-port", type=number(1, 65535), metavar="N", help=sidecar)
    parser.add_argument(
        "--model-config", metavar="MODEL", help="a Hugging Face config.json or its directory"
    )
    ranks = "ranks of the expert-parallel group"
    parser.add_argument("--ep", type=number(1, 4096), metavar="N", default=2, help=ranks)
    slots = "replica slots per rank"
    parser.add_argument("--slots", type=number(0, 64), metavar="N", default=2, help=slots)
    weights = "type of the experts' weights"
    parser.add_argument("--weights", choices=list(WEIGHT_BITS), default="bf16", help=weights)
    add_json_argument(parser)
    parser.add_argument(
        "serving",
        nargs=argparse.REMAINDER,
        metavar="vllm|sglang MODEL ...",
        help="the command that will serve, with all its flags; it replaces --port, "
        "--sidecar-port, --model-config, --ep and --slots",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 when serving would fail, else 0. Raises ConfigError for bad flags."""
    prepare_outputs(arguments.json)
    findings = diagnose(_subject(arguments))
    view = _table(findings) if find_spec("rich") else _plain(findings)
    show(_document(findings), view, arguments.json)
    return int(any(finding.status is Status.ERROR for finding in findings))


def _document(findings: list[Finding]) -> dict[str, Any]:
    counts = {status.value: sum(f.status is status for f in findings) for status in Status}
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "counts": counts,
        "findings": [{**asdict(f), "status": f.status.value} for f in findings],
    }


def _subject(arguments: argparse.Namespace) -> Subject:
    if arguments.serving:
        return _served(arguments.serving, arguments.weights)
    return Subject(
        port=arguments.port,
        sidecar_port=arguments.sidecar_port,
        model=arguments.model_config,
        num_ranks=arguments.ep,
        num_slots=arguments.slots,
        weight_type=arguments.weights,
    )


def _served(command: list[str], weight_type: str) -> Subject:
    """What ``command`` would serve on this host."""
    parser = Parser(prog="ultraep-serve doctor")
    engines = parser.add_subparsers(dest="command", required=True, metavar="vllm|sglang")
    for engine in serve.LAUNCHERS:
        serve.add_arguments(engines.add_parser(engine))
    ours, flags = parser.parse_known_args(command)
    config = BalanceConfig(**values_of_flags(ours, BalanceConfig))
    sidecar = SidecarSettings(**values_of_flags(ours, SidecarSettings, "sidecar-"))
    launch = serve.LAUNCHERS[ours.command]
    parsed = launch.parse_engine_flags(flags)
    ranks = launch.count_ranks(parsed)
    return Subject(
        port=parsed.port,
        sidecar_port=sidecar.port,
        serves=not getattr(parsed, "headless", False),  # a flag of vLLM's
        model=ours.model if Path(ours.model).exists() else None,  # else checked when it is loaded
        num_ranks=ranks.in_stage,
        host_ranks=ranks.in_stage_here,
        num_stages=ranks.stages,
        all_host_ranks=ranks.here,
        domain_size=config.domain_size,
        num_slots=config.slots * _micro_batches(parsed),
        weight_type=weight_type,
    )


def _micro_batches(parsed: argparse.Namespace) -> int:
    """How many overlap, each with slots of its own; by flags of vLLM's."""
    return 2 if getattr(parsed, "enable_dbo", False) else max(1, getattr(parsed, "ubatch_size", 0))


def _plain(findings: list[Finding]) -> str:
    """Findings where rich is missing: the doctor must work where things are missing."""
    remedies = (f" -> {finding.remedy}" if finding.remedy else "" for finding in findings)
    lines = (f"{finding.status.value:8}{finding.name}: {finding.seen}" for finding in findings)
    return "\n".join(map("".join, zip(lines, remedies, strict=True)))


def _table(findings: list[Finding]) -> "RenderableType":
    """Findings for a terminal: mark, name, what was seen, remedy below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        mark, style = _MARKS[finding.status]
        seen = Text(finding.seen)
        if finding.remedy:
            seen.append(f"\n→ {finding.remedy}", style="cyan")
        table.add_row(Text(mark, style=style), Text(finding.name, style=style), seen)
    return table
