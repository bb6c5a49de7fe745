"""`ultraep-serve ENGINE MODEL [flags]`: checks, adds our setting, and becomes the engine."""

import argparse
import os
from typing import Any

from ultraep_serve.config import BalanceConfig, SidecarSettings, add_file_flag, given_settings
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher import sglang, vllm
from ultraep_serve.launcher.engine import EngineCommand
from ultraep_serve.system.logs import say
from ultraep_serve.system.machine import address_of, why_not_listen
from ultraep_serve.types import Policy

__all__ = ["LAUNCHERS", "add_arguments", "checked_command", "run"]

LAUNCHERS: dict[str, Any] = {"vllm": vllm, "sglang": sglang}  # by command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our flags; whatever else is given is the engine's."""
    parser.description = (
        "Start the engine's OpenAI-compatible server with balancing on and the sidecar beside it. "
        "Flags that are not listed here are the engine's own and are passed on."
    )
    parser.add_argument("model", help="what vLLM takes as --model, SGLang as --model-path")
    add_file_flag(parser)
    BalanceConfig.add_flags(parser.add_argument_group("balancing"))
    sidecar = parser.add_argument_group("sidecar")
    SidecarSettings.add_flags(sidecar, "sidecar-")
    sidecar.add_argument(
        "--no-sidecar",
        action="store_true",
        help="start no sidecar; `ultraep-serve sidecar` runs one apart from the server",
    )
    parser.allow_abbrev = False  # what we do not know is the engine's
    parser.set_defaults(passes_flags_on=True)


def run(arguments: argparse.Namespace) -> int:
    """Become the engine. Raises UltraEPError for what cannot be started."""
    config, sidecar = given_settings(arguments, "sidecar-")
    command = checked_command(arguments, config, sidecar)
    for line in command.said:
        say(line)
    program, *_ = command.arguments
    os.execve(program, command.arguments, command.environment)


def checked_command(
    arguments: argparse.Namespace, config: BalanceConfig, sidecar: SidecarSettings
) -> EngineCommand:
    """How the engine is to be started. Raises UltraEPError for what cannot be started."""
    launch, flags = LAUNCHERS[arguments.command], arguments.engine_flags
    port = sidecar.port_beside(launch.parse_engine_flags(flags).port)
    has_sidecar = config.policy is not Policy.OFF and not arguments.no_sidecar
    config = config.replace(sidecar=sidecar.replace(port=port) if has_sidecar else None)
    command: EngineCommand = launch.engine_command(arguments.model, flags, config)
    if command.address is not None:
        _check_port(*command.address, "--port")
    if has_sidecar:
        _check_port(sidecar.host, port, "--sidecar-port")
    return command


def _check_port(host: str, port: int, flag: str) -> None:
    if reason := why_not_listen(host, port):
        address = address_of(host, port)
        raise ConfigError(f"{address} cannot be used ({reason}); choose another {flag}")
