"""The command line, `ultraep-serve`: one file per command."""

import argparse
import sys

from ultraep_serve import __version__
from ultraep_serve.cli import (
    advise,
    bench,
    demo,
    doctor,
    make_trace,
    record,
    replay,
    serve,
    sidecar,
)
from ultraep_serve.errors import UltraEPError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of ours are one line on stderr and 2."""
    parser = argparse.ArgumentParser(
        prog="ultraep-serve", description="Real-time expert load balancing for MoE serving."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, bench, demo, sidecar, record, replay, advise, make_trace, doctor):
        command.add_parser(commands)
    options, engine_flags = parser.parse_known_args(arguments)
    if engine_flags and not getattr(options, "passes_flags_on", False):
        parser.error(f"unrecognized arguments: {' '.join(engine_flags)}")
    options.engine_flags = engine_flags
    try:
        return int(options.run(options))
    except UltraEPError as error:
        print(f"ultraep-serve: error: {error}", file=sys.stderr)
        return 2
