"""`ultraep-serve ENGINE MODEL [flags]`: checks, adds our setting, and becomes the engine."""

import argparse
import os
from importlib.util import find_spec
from typing import Any

from ultraep_serve.config import BalanceConfig, SidecarSettings, add_file_flag, given_settings
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher import engine, sglang, vllm
from ultraep_serve.launcher.engine import EngineCommand
from ultraep_serve.system.machine import address_of, is_here, why_not_listen
from ultraep_serve.system.refusals import say
from ultraep_serve.types import Policy

LAUNCHERS: dict[str, Any] = {"vllm": vllm, "sglang": sglang}  # by command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our flags; whatever else is given is the engine's."""
    parser.usage = "%(prog)s MODEL [flags]"
    parser.description = (
        "Start the engine's OpenAI-compatible server with balancing on and the sidecar beside it. "
        "Flags that are not listed here are the engine's own and are passed on."
    )
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
    command = checked_command(arguments, read_flags(arguments), config, sidecar)
    for line in command.said:
        say(line)
    program, *_ = command.arguments
    os.execve(program, command.arguments, command.environment)


def read_flags(arguments: argparse.Namespace) -> argparse.Namespace:
    """The engine's flags, as the engine that ``arguments`` name reads them. Raises ConfigError."""
    name = arguments.command
    if find_spec(name) is None:
        raise ConfigError(LAUNCHERS[name].MISSING)
    parsed = engine.read_flags(name, _engine_flags(arguments))
    if not parsed.model:
        raise ConfigError(f"name a model: ultraep-serve {name} MODEL [flags]")
    return parsed


def checked_command(
    arguments: argparse.Namespace,
    parsed: argparse.Namespace,
    config: BalanceConfig,
    sidecar: SidecarSettings,
) -> EngineCommand:
    """How the engine is to be started. Raises UltraEPError for what cannot be started."""
    port = sidecar.port_beside(parsed.port)
    has_sidecar = config.policy is not Policy.OFF and not arguments.no_sidecar
    config = config.replace(sidecar=sidecar.replace(port=port) if has_sidecar else None)
    launch, flags = LAUNCHERS[arguments.command], _engine_flags(arguments)
    command: EngineCommand = launch.engine_command(parsed, flags, config)
    if command.address is not None:
        _check_port(*command.address, "")
    if has_sidecar:
        if command.address is not None and command.address[1] == port:
            raise ConfigError(f"the server has port {port} itself; choose another --sidecar-port")
        _check_port(sidecar.host, port, "sidecar-")
    return command


def _engine_flags(arguments: argparse.Namespace) -> list[str]:
    """What is not ours of the command line, the model, which may come first, by its flag."""
    given: list[str] = arguments.engine_flags
    return ["--model", *given] if given and not given[0].startswith("-") else given


def _check_port(host: str, port: int, prefix: str) -> None:
    if reason := why_not_listen(host, port):
        address, wrong = address_of(host, port), "port" if is_here(host) else "host"
        raise ConfigError(f"{address} cannot be used ({reason}); choose another --{prefix}{wrong}")
