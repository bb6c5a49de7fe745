"""The sidecar's command line."""

import argparse
from pathlib import Path

from ultraep_serve.sidecar.allocator import give_memory_back
from ultraep_serve.sidecar.logs import set_up_logging
from ultraep_serve.sidecar.server import serve
from ultraep_serve.sidecar.tokens import control_token

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` takes."""
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8001, help="0: a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines of text or of JSON (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-ideal", action="store_true", help="permit the policy that gives wrong answers"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError when the address cannot be used."""
    give_memory_back()
    set_up_logging(arguments.log_format)
    serve(
        arguments.run_dir,
        host=arguments.host,
        port=arguments.port,
        token=control_token(arguments.run_dir),
        allow_ideal=arguments.allow_ideal,
    )
    return 0
