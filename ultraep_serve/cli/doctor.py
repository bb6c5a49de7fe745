"""`ultraep-serve doctor`: what stands in the way of serving here, and what to do about it."""

import argparse
import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_serve import __version__
from ultraep_serve.cli import serve
from ultraep_serve.config import BalanceConfig, SidecarSettings, values_of_flags
from ultraep_serve.doctor import diagnose
from ultraep_serve.doctor.finding import Finding, Status, Subject
from ultraep_serve.errors import ConfigError
from ultraep_serve.offline.shapes import WEIGHT_BITS

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add_parser", "run"]

SCHEMA_VERSION = 1
_MARKS = {
    Status.OK: ("✔", "green"),
    Status.WARNING: ("!", "yellow"),
    Status.ERROR: ("✘", "bold red"),
}


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, the engine and a running server",
        description="Check what serving with balancing needs, and say how to mend what is missing. "
        "Changes nothing. Exits with 1 when there is an error.",
    )
    shown = "(default: %(default)s)"
    parser.add_argument("--port", type=int, help="of a server that runs, or is to run, here")
    parser.add_argument("--sidecar-port", type=int, help="default: the server's + 1")
    parser.add_argument("--model", metavar="DIR", help="a model's directory or config.json")
    parser.add_argument("--ep", type=int, default=2, help=f"expert-parallel ranks {shown}")
    parser.add_argument("--slots", type=int, default=2, help=f"replica slots per rank {shown}")
    parser.add_argument(
        "--weights", choices=sorted(WEIGHT_BITS), default="bf16", help=f"type of weights {shown}"
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument(
        "serving",
        nargs=argparse.REMAINDER,
        metavar="vllm|sglang MODEL ...",
        help="the command that is to serve, with all its flags; says more than --port, "
        "--sidecar-port, --model, --ep and --slots, which it replaces",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 when serving would fail, else 0. Raises ConfigError for bad flags."""
    findings = diagnose(_subject(arguments))
    if arguments.json:
        print(json.dumps(document(findings), indent=2))
    else:
        _show(findings)
    return int(any(finding.status is Status.ERROR for finding in findings))


def document(findings: list[Finding]) -> dict[str, Any]:
    """``findings`` as JSON has them."""
    counts = {status.value: sum(f.status is status for f in findings) for status in Status}
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "counts": counts,
        "findings": [{**asdict(f), "status": f.status.value} for f in findings],
    }


def _subject(arguments: argparse.Namespace) -> Subject:
    for flag, value, least, most in (
        ("--port", arguments.port, 1, 65534),
        ("--sidecar-port", arguments.sidecar_port, 1, 65535),
        ("--ep", arguments.ep, 1, 4096),
        ("--slots", arguments.slots, 0, 64),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{flag} {value} must be {least} to {most}")
    if arguments.serving:
        return _served(arguments.serving, arguments.weights)
    return Subject(
        port=arguments.port,
        sidecar_port=arguments.sidecar_port,
        model=arguments.model,
        num_ranks=arguments.ep,
        num_slots=arguments.slots,
        weight_type=arguments.weights,
    )


def _served(command: list[str], weight_type: str) -> Subject:
    """What ``command`` would serve on this host."""
    parser = argparse.ArgumentParser(prog="ultraep-serve doctor")
    serve.add_parser(parser.add_subparsers(required=True, metavar="vllm|sglang"))
    ours, flags = parser.parse_known_args(command)
    config = BalanceConfig(**values_of_flags(ours, BalanceConfig))
    sidecar = SidecarSettings(**values_of_flags(ours, SidecarSettings, "sidecar-"))
    engine = ours.launch.parse_engine_flags(flags)
    ranks = ours.launch.count_ranks(engine)
    return Subject(
        port=engine.port,
        sidecar_port=sidecar.port,
        serves=not getattr(engine, "headless", False),  # a flag of vLLM's
        model=ours.model if Path(ours.model).exists() else None,  # else checked when it is loaded
        num_ranks=ranks.total,
        host_ranks=ranks.here,
        domain_size=config.domain_size,
        num_slots=config.slots * _micro_batches(engine),
        weight_type=weight_type,
    )


def _micro_batches(engine: argparse.Namespace) -> int:
    """How many overlap, each with slots of its own; by flags of vLLM's."""
    return 2 if getattr(engine, "enable_dbo", False) else max(1, getattr(engine, "ubatch_size", 0))


def _show(findings: list[Finding]) -> None:
    if find_spec("rich") is None:  # the doctor must work where things are missing
        for finding in findings:
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            print(f"{finding.status.value:8}{finding.name}: {finding.seen}{remedy}")
        return
    from rich.console import Console

    Console().print(_view(findings))


def _view(findings: list[Finding]) -> "RenderableType":
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
