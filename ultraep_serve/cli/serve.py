"""`ultraep-serve ENGINE MODEL [flags]`: the engine's server with balancing on and the sidecar."""

import argparse
import socket
import sys
from pathlib import Path
from typing import Any

from ultraep_serve.adapters.sglang import launch as sglang
from ultraep_serve.adapters.vllm import launch as vllm
from ultraep_serve.cli.arguments import DEFAULT, read_costs
from ultraep_serve.config import BalanceConfig, parse_policy
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.run_directory import TOKEN_FILE, run_directory
from ultraep_serve.launcher.supervisor import supervise
from ultraep_serve.types import Policy

__all__ = ["add_parser", "run"]

_DEFAULTS = BalanceConfig()
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
        _add_balance_arguments(parser.add_argument_group("balancing"))
        _add_sidecar_arguments(parser.add_argument_group("sidecar"))
        parser.set_defaults(run=run, launch=launch, passes_flags_on=True)


def _add_balance_arguments(group: Any) -> None:
    """The flags of balancing itself, the same for every engine."""
    _add_setting(group, "--policy", _DEFAULTS.policy.value, "off, quota, eplb or ideal")
    _add_setting(
        group,
        "--slots",
        _DEFAULTS.num_replica_slots,
        "replica slots per rank, shared by all layers",
    )
    _add_setting(
        group,
        "--min-batch-tokens",
        _DEFAULTS.min_batch_tokens,
        "smaller batches (decode) are left alone",
    )
    _add_setting(
        group,
        "--max-imbalance",
        _DEFAULTS.max_imbalance,
        "layers at or below this max/mean over ranks are left alone",
    )
    _add_setting(
        group,
        "--on-unsupported",
        _DEFAULTS.on_unsupported,
        "what cannot be balanced: error, or off to serve without balancing",
    )
    _add_setting(
        group,
        "--slot-memory",
        _DEFAULTS.slot_memory,
        "aliased: one pool for all layers; per_layer: one each",
    )
    _add_setting(
        group,
        "--domain-size",
        _DEFAULTS.domain_size,
        "weights move between this many ranks of a host; 0: all of them",
    )
    _add_setting(group, "--relay", _DEFAULTS.relay, "auto, always or never")
    _add_setting(
        group,
        "--timeout-seconds",
        _DEFAULTS.timeout_seconds,
        "a rank silent for longer is an error",
    )
    group.add_argument(
        "--costs", type=Path, help="cost model, JSON (default: measured when the model is loaded)"
    )
    group.add_argument(
        "--allow-ideal",
        action="store_true",
        help="permit policy ideal, which gives wrong answers (for measuring)",
    )


def _add_sidecar_arguments(group: Any) -> None:
    _add_setting(group, "--sidecar-host", "127.0.0.1", "address of the sidecar")
    group.add_argument(
        "--sidecar-port", type=int, help="port of the sidecar (default: the server's + 1)"
    )
    group.add_argument(
        "--sidecar-log-format",
        choices=("text", "json"),
        default="text",
        help=f"lines of text or of JSON ({DEFAULT})",
    )
    group.add_argument(
        "--no-sidecar",
        action="store_true",
        help="start none; `ultraep-serve sidecar` runs one apart from the server",
    )


def _add_setting(group: Any, flag: str, default: str | float, meaning: str) -> None:
    """A flag of the type that its default has."""
    group.add_argument(flag, type=type(default), default=default, help=f"{meaning} ({DEFAULT})")


def run(arguments: argparse.Namespace) -> int:
    """Serve until the engine ends. Raises UltraEPError for what cannot be started."""
    launch = arguments.launch
    flags: list[str] = arguments.engine_flags
    policy = parse_policy(arguments.policy)
    parsed = launch.parse_engine_flags(flags)
    command = launch.engine_command(arguments.model, flags, policy)
    sidecar_port = arguments.sidecar_port or parsed.port + 1
    if command.url is not None:
        _check_port(parsed.host, parsed.port, "--port")
    with_sidecar = policy is not Policy.OFF and not arguments.no_sidecar
    if with_sidecar:
        _check_port(arguments.sidecar_host, sidecar_port, "--sidecar-port")
    balance_config(arguments, "")  # refuse bad settings before anything is created
    with run_directory(parsed.port) as run_path:
        config = balance_config(arguments, str(run_path))
        (run_path / "config.json").write_text(config.to_json())
        sidecar = None
        if with_sidecar:
            sidecar = ["--run-dir", str(run_path), "--host", arguments.sidecar_host]
            sidecar += ["--port", str(sidecar_port)]
            sidecar += ["--log-format", arguments.sidecar_log_format]
            sidecar += ["--allow-ideal"] if config.allow_ideal else []
            _announce(arguments.sidecar_host, sidecar_port, run_path)
        return supervise(command, config, sidecar)


def balance_config(arguments: argparse.Namespace, run_dir: str) -> BalanceConfig:
    """The configuration that the flags describe. Raises ConfigError naming the legal values."""
    return BalanceConfig(
        policy=parse_policy(arguments.policy),
        num_replica_slots=arguments.slots,
        min_batch_tokens=arguments.min_batch_tokens,
        max_imbalance=arguments.max_imbalance,
        allow_ideal=arguments.allow_ideal,
        on_unsupported=arguments.on_unsupported,
        slot_memory=arguments.slot_memory,
        relay=arguments.relay,
        domain_size=arguments.domain_size,
        timeout_seconds=arguments.timeout_seconds,
        costs=read_costs(arguments.costs).to_json() if arguments.costs else "",
        run_dir=run_dir,
    )


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
