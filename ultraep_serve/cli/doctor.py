"""`ultraep-serve doctor`: what would keep a server from balancing here, and what to do."""

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from pydantic import Field

from ultraep_serve import __version__
from ultraep_serve.cli import Parser, printable, serve
from ultraep_serve.config import given_settings
from ultraep_serve.doctor import Finding, Status, Subject, diagnose
from ultraep_serve.errors import UltraEPError
from ultraep_serve.system.settings import Settings
from ultraep_serve.types import Policy

SCHEMA_VERSION = 1
_MARKS = {Status.OK: "✔", Status.WARNING: "!", Status.ERROR: "✘"}


class DoctorFlags(Settings):
    """A server that runs, and how to show the result."""

    port: int | None = Field(
        default=None, ge=1, le=65535, description="port of a server that runs on this machine"
    )
    as_json: bool = Field(
        default=False, validation_alias="json", description="print the result as JSON"
    )


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
        help="the command that will serve, with all its flags",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 when serving would fail, else 0. Raises ConfigError for bad flags."""
    flags = DoctorFlags.from_flags(arguments)
    serving = arguments.serving
    findings = diagnose(_served(serving) if serving else Subject(port=flags.port))
    if flags.as_json:
        print(json.dumps(_document(findings), indent=2))
    else:
        print(printable("\n".join(map(_lines, findings))))
    return int(any(finding.status is Status.ERROR for finding in findings))


def _lines(finding: Finding) -> str:
    remedy = f"\n  {'':13} → {finding.remedy}" if finding.remedy else ""
    return f"{_MARKS[finding.status]} {finding.name:13} {finding.seen}{remedy}"


def _document(findings: list[Finding]) -> dict[str, Any]:
    counts = {status.value: sum(f.status is status for f in findings) for status in Status}
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "counts": counts,
        "findings": [{**asdict(f), "status": f.status.value} for f in findings],
    }


def _served(command: list[str]) -> Subject:
    """What ``command`` would serve on this host, and what the launcher says of it."""
    parser = Parser(prog="ultraep-serve doctor")
    engines = parser.add_subparsers(dest="command", required=True, metavar="vllm|sglang")
    for engine in serve.LAUNCHERS:
        serve.add_arguments(engines.add_parser(engine))
    ours, flags = parser.parse_known_args(command)
    ours.engine_flags = flags
    config, sidecar = given_settings(ours, "sidecar-")
    parsed, launch = serve.read_flags(ours), serve.LAUNCHERS[ours.command]
    refusal = ""
    try:
        serve.checked_command(ours, parsed, config, sidecar)
    except UltraEPError as error:
        refusal = str(error)
    is_known = os.path.isdir(parsed.model) and config.policy is not Policy.OFF
    return Subject(
        config=config,
        ranks=launch.count_ranks(parsed),
        model=parsed.model if is_known and not refusal else None,
        port=parsed.port,
        refusal=refusal,
    )
