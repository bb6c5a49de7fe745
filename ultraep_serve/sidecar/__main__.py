"""``python -m ultraep_serve.sidecar --run-dir DIR``: what the launcher starts beside the engine."""

import argparse
import logging
from pathlib import Path

from ultraep_serve.errors import ConfigError
from ultraep_serve.sidecar.server import serve
from ultraep_serve.sidecar.tokens import control_token

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Parse ``arguments`` and serve; exits with 2 and a message when that cannot be."""
    parser = argparse.ArgumentParser(prog="ultraep-serve sidecar", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="where the rings are")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8001, help="0 takes a free one")
    parser.add_argument(
        "--allow-ideal", action="store_true", help="permit the policy that gives wrong answers"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        serve(
            options.run_dir,
            host=options.host,
            port=options.port,
            token=control_token(options.run_dir),
            allow_ideal=options.allow_ideal,
        )
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
