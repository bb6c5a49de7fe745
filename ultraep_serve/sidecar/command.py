"""The sidecar's command line."""

import argparse
import logging
from pathlib import Path

from ultraep_serve.sidecar.server import serve
from ultraep_serve.sidecar.tokens import control_token

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` takes."""
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8001, help="0 takes a free one")
    parser.add_argument(
        "--allow-ideal", action="store_true", help="permit the policy that gives wrong answers"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError when the address cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    serve(
        arguments.run_dir,
        host=arguments.host,
        port=arguments.port,
        token=control_token(arguments.run_dir),
        allow_ideal=arguments.allow_ideal,
    )
    return 0
