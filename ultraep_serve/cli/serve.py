"""`ultraep-serve ENGINE MODEL [flags]`: the engine's server with balancing on and the sidecar."""

import argparse
import socket
import sys
from pathlib import Path
from typing import Any

from ultraep_serve.adapters.sglang import launch as sglang
from ultraep_serve.adapters.vllm import launch as vllm
from ultraep_serve.config import BalanceConfig, SidecarSettings, add_flags, values_of_flags
from ultraep_serve.errors import ConfigError
from ultraep_serve.files import write_whole
from ultraep_serve.launcher.run_directory import TOKEN_FILE, run_directory
from ultraep_serve.launcher.supervisor import supervise
from ultraep_serve.types import Policy

__all__ = ["add_parser", "run"]

_ENGINES: dict[str, tuple[str, str, Any]] = {  # command: title, flag of the model, launch module
    "vllm": ("vLLM", "--model", vllm),
    "sglang": ("SGLang", "--model-path", sglang),
}


def add_parser(subparsers: Any) -> None:
    """Add one command per engine to the main parser's ``subparsers``."""
    for name, (title, model_flag, launch) in _ENGINES.items():
        parser = subparsers.add_parser(
            name,
            help=f"serve a model with {title}, every prefill batch balanced",
            description=f"Start {title}'s OpenAI server with balancing on and the sidecar beside "
            f"it. Flags that are not listed here are {title}'s own and are passed on.",
            allow_abbrev=False,
        )
        parser.add_argument("model", help=f"what {title} takes as {model_flag}")
        add_flags(parser.add_argument_group("balancing"), BalanceConfig)
        sidecar = parser.add_argument_group("sidecar")
        add_flags(sidecar, SidecarSettings, "sidecar-")
        sidecar.add_argument(
            "--no-sidecar",
            action="store_true",
            help="start none; `ultraep-serve sidecar` runs one apart from the server",
        )
        parser.set_defaults(run=run, launch=launch, passes_flags_on=True)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the engine ends. Raises UltraEPError for what cannot be started."""
    launch = arguments.launch
    flags: list[str] = arguments.engine_flags
    config = BalanceConfig(**values_of_flags(arguments, BalanceConfig))
    sidecar = SidecarSettings(**values_of_flags(arguments, SidecarSettings, "sidecar-"))
    parsed = launch.parse_engine_flags(flags)
    command = launch.engine_command(arguments.model, flags, config.policy)
    sidecar_port = parsed.port + 1 if sidecar.port is None else sidecar.port
    if command.url is not None:
        _check_port(parsed.host, parsed.port, "--port")
    with_sidecar = config.policy is not Policy.OFF and not arguments.no_sidecar
    if with_sidecar:
        _check_port(sidecar.host, sidecar_port, "--sidecar-port")
    with run_directory(parsed.port) as run_path:
        config = config.replace(run_dir=str(run_path))
        write_whole(run_path / "config.json", config.to_json().encode())
        sidecar_arguments = None
        if with_sidecar:
            sidecar_arguments = ["--run-dir", str(run_path), "--host", sidecar.host]
            sidecar_arguments += ["--port", str(sidecar_port), "--log-format", sidecar.log_format]
            sidecar_arguments += ["--allow-ideal"] if config.allow_ideal else []
            _announce(sidecar.host, sidecar_port, run_path)
        return supervise(command, config, sidecar_arguments)


def _announce(host: str, port: int, run_path: Path) -> None:
    print(
        f"ultraep: sidecar on http://{host}:{port} (/v1/balance, /metrics, /readyz), "
        f"control token in {run_path / TOKEN_FILE}",
        file=sys.stderr,
        flush=True,
    )


def _check_port(host: str, port: int, flag: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be used ({error.strerror}); choose another {flag}"
            ) from None
