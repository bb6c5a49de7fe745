"""`ultraep-serve ENGINE MODEL [flags]`: the engine's server with balancing on and the sidecar."""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ultraep_serve.config import BalanceConfig, SidecarSettings, add_file_flag, given_settings
from ultraep_serve.engines.sglang import launch as sglang
from ultraep_serve.engines.vllm import launch as vllm
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.sidecar import sidecar_command
from ultraep_serve.launcher.supervisor import EngineCommand, supervise
from ultraep_serve.launcher.tuned_kernels import link_tuned_kernels
from ultraep_serve.system.environment import child_environment
from ultraep_serve.system.logs import say
from ultraep_serve.system.machine import why_not_listen
from ultraep_serve.telemetry.run_directory import is_running, run_directory
from ultraep_serve.telemetry.run_files import RunFiles
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
    """Serve until the engine ends. Raises UltraEPError for what cannot be started."""
    config, sidecar = given_settings(arguments, "sidecar-")
    return _serve(arguments, config, sidecar)


def checked_command(
    arguments: argparse.Namespace, config: BalanceConfig, sidecar: SidecarSettings
) -> EngineCommand:
    """How the engine is to be started. Raises UltraEPError for what cannot be started."""
    launch, flags = LAUNCHERS[arguments.command], arguments.engine_flags
    parsed = launch.parse_engine_flags(flags)
    command: EngineCommand = launch.engine_command(arguments.model, flags, config.policy)
    if is_running(parsed.port):
        raise ConfigError(
            f"a balanced server on port {parsed.port} is running already; stop it or choose "
            "another --port"
        )
    if command.url is not None:
        _check_port(parsed.host, parsed.port, "--port")
    if _has_sidecar(arguments, config):
        _check_port(sidecar.host, sidecar.port_beside(parsed.port), "--sidecar-port")
    return command


def _has_sidecar(arguments: argparse.Namespace, config: BalanceConfig) -> bool:
    return config.policy is not Policy.OFF and not arguments.no_sidecar


def _serve(arguments: argparse.Namespace, config: BalanceConfig, sidecar: SidecarSettings) -> int:
    command = checked_command(arguments, config, sidecar)
    parsed = LAUNCHERS[arguments.command].parse_engine_flags(arguments.engine_flags)
    sidecar_port = sidecar.port_beside(parsed.port)
    with run_directory(parsed.port) as run_path:
        config = config.replace(run_dir=str(run_path))
        files = RunFiles(run_path)
        files.write_config(config.to_json())
        if command.tuned is not None and config.policy is not Policy.OFF:
            tuned = link_tuned_kernels(command.tuned, config.slots, files.tuned)
            command = replace(command, environment={**command.environment, **tuned})
        if command.binding is not None:
            started_with = child_environment(config.to_json(), command.environment)
            _say_all(command.binding.lines(started_with.get(command.binding.variable)))
        _say_all(command.said)
        beside = None
        if _has_sidecar(arguments, config):
            beside = sidecar_command(config, sidecar, sidecar_port)
            _announce(sidecar.host, sidecar_port, files)
        return supervise(command, config, beside)


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _announce(host: str, port: int, files: RunFiles) -> None:
    say(
        f"sidecar on http://{host}:{port} (/v1/balance, /metrics, /readyz), "
        f"control token in {files.token}"
    )


def _check_port(host: str, port: int, flag: str) -> None:
    if reason := why_not_listen(host, port):
        raise ConfigError(f"{host}:{port} cannot be used ({reason}); choose another {flag}")
