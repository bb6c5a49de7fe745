"""`ultraep-serve doctor`: what would keep a server from balancing here, and what to do."""

import argparse
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ultraep_serve import __version__
from ultraep_serve.cli import Parser, serve
from ultraep_serve.cli.arguments import JsonFile, WeightType, prepare_outputs, show
from ultraep_serve.config import SIDECAR_DISTANCE, BalanceConfig, given_settings
from ultraep_serve.doctor import diagnose
from ultraep_serve.doctor.finding import Finding, Status, Subject
from ultraep_serve.doctor.report import write_report
from ultraep_serve.errors import UltraEPError
from ultraep_serve.launcher.binding import (
    bind_ranks,
    binding_text,
    binding_warnings,
    cores_here,
    cores_of_hwloc,
    cpu_quota,
    memory_nodes_here,
)
from ultraep_serve.system.settings import Directory, Settings, Shown
from ultraep_serve.types import Policy

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add_arguments", "run"]

SCHEMA_VERSION = 1
_MARKS = {
    Status.OK: ("✔", "green"),
    Status.WARNING: ("!", "yellow"),
    Status.ERROR: ("✘", "bold red"),
}


class DoctorFlags(Settings):
    """What is to be served, as single flags."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="port of a server that runs, or will run, on this machine",
    )
    sidecar_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description=f"its sidecar's port (default: the server's + {SIDECAR_DISTANCE})",
    )
    model: Annotated[str, Shown("MODEL")] | None = Field(
        default=None,
        validation_alias="model_config",
        description="a Hugging Face config.json or its directory",
    )
    ep: int = Field(default=2, ge=1, le=4096, description="ranks of the expert-parallel group")
    slots: int = Field(default=2, ge=0, le=64, description="replica slots per rank")
    weights: WeightType = "bf16"
    binding: bool = Field(
        default=False,
        description="show only which cores each rank of a host would compute on",
    )
    ranks: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="ranks on the host that --binding shows (default: those of --ep)",
    )
    topology: Annotated[str, Shown("FILE")] | None = Field(
        default=None,
        description="another machine for --binding, as hwloc's `lstopo --of xml` writes it "
        "(default: this one)",
    )
    report: Annotated[Path, Shown("FILE")] | None = Field(
        default=None,
        description="write an archive (zip) to send with a report of a problem: versions, "
        "hardware, settings, self-check, metrics, last records; it names nobody",
    )
    run_dir: Directory | None = Field(
        default=None,
        description="run directory of the server that --report is about, running or not (default: "
        "that of --port, or of the only server that runs)",
    )
    log: Annotated[Path, Shown("FILE")] | None = Field(
        default=None,
        description="the engine's log, of which --report takes the last lines of this package",
    )
    json_file: JsonFile = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``DoctorFlags``, or the command that will serve."""
    parser.description = (
        "Check what serving with balancing needs, and say how to fix what is missing. Changes "
        "nothing. Exits with 1 when there is an error."
    )
    DoctorFlags.add_flags(parser)
    parser.add_argument(
        "serving",
        nargs=argparse.REMAINDER,
        metavar="vllm|sglang MODEL ...",
        help="the command that will serve, with all its flags; it replaces --port, "
        "--sidecar-port, --model-config, --ep and --slots",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 when serving would fail, else 0. Raises ConfigError for bad flags."""
    flags = DoctorFlags.from_flags(arguments)
    prepare_outputs(flags.json_file, flags.report)
    if flags.binding:
        return _show_binding(flags)
    findings = diagnose(_subject(flags, arguments.serving))
    view = _table(findings) if find_spec("rich") else _plain(findings)
    show(_document(findings), view, flags.json_file)
    if flags.report is not None:
        names = write_report(
            flags.report,
            _document(findings),
            run_dir=flags.run_dir,
            port=flags.port,
            log=flags.log,
        )
        if flags.json_file != Path("-"):
            print(f"{flags.report}: {', '.join(names)}; look through it before you send it")
    return int(any(finding.status is Status.ERROR for finding in findings))


def _show_binding(flags: DoctorFlags) -> int:
    """Print each rank's cores and node, and what is wrong with them."""
    if flags.topology is None:
        cores, quota, memory = cores_here(), cpu_quota(), memory_nodes_here()
    else:
        cores, quota, memory = cores_of_hwloc(Path(flags.topology)), None, None
    ranks = bind_ranks(cores, flags.ranks or flags.ep)
    warnings = binding_warnings(ranks, cores, quota=quota, memory_nodes=memory)
    document = {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "ranks": [asdict(rank) for rank in ranks],
        "warnings": warnings,
    }
    lines = [*binding_text(ranks), *(f"! {warning}" for warning in warnings)]
    show(document, "\n".join(lines), flags.json_file)
    return 0


def _document(findings: list[Finding]) -> dict[str, Any]:
    counts = {status.value: sum(f.status is status for f in findings) for status in Status}
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "counts": counts,
        "findings": [{**asdict(f), "status": f.status.value} for f in findings],
    }


def _subject(flags: DoctorFlags, serving: list[str]) -> Subject:
    if serving:
        return _served(serving, flags.weights)
    return Subject(
        port=flags.port,
        sidecar_port=flags.sidecar_port,
        model=flags.model,
        num_ranks=flags.ep,
        num_slots=flags.slots,
        weight_type=flags.weights,
    )


def _served(command: list[str], weight_type: str) -> Subject:
    """What ``command`` would serve on this host."""
    parser = Parser(prog="ultraep-serve doctor")
    engines = parser.add_subparsers(dest="command", required=True, metavar="vllm|sglang")
    for engine in serve.LAUNCHERS:
        serve.add_arguments(engines.add_parser(engine))
    ours, flags = parser.parse_known_args(command)
    config, sidecar = given_settings(ours, "sidecar-")
    launch = serve.LAUNCHERS[ours.command]
    parsed = launch.parse_engine_flags(flags)
    ranks = launch.count_ranks(parsed)
    return Subject(
        port=parsed.port,
        sidecar_port=sidecar.port,
        host=parsed.host,
        sidecar_host=sidecar.host,
        has_sidecar=config.policy is not Policy.OFF and not ours.no_sidecar,
        serves=not getattr(parsed, "headless", False),  # a flag of vLLM's
        # One that is not here is checked when it is loaded.
        model=ours.model if os.path.exists(ours.model) and _balances(config, parsed) else None,
        num_ranks=ranks.in_stage,
        host_ranks=ranks.in_stage_here,
        num_stages=ranks.stages,
        all_host_ranks=ranks.here,
        domain_size=config.domain_size,
        num_slots=config.slots * _micro_batches(parsed),
        weight_type=weight_type,
        on_newer_engine=config.on_newer_engine,
        command=_refusal(launch, ours.model, flags, config.policy),
    )


def _balances(config: BalanceConfig, parsed: argparse.Namespace) -> bool:
    """Whether it is known on how many ranks: the engine's own file of flags is not read."""
    return config.policy is not Policy.OFF and not parsed.config


def _refusal(launch: Any, model: str, flags: list[str], policy: Policy) -> str:
    """What the launcher would say instead of starting the engine; empty where it would start it."""
    try:
        launch.engine_command(model, flags, policy)
    except UltraEPError as error:
        return str(error)
    return ""


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
