"""`ultraep-serve sidecar`: a sidecar apart from the server; it survives the engine."""

import argparse
from importlib.util import find_spec
from typing import Any

from ultraep_serve.errors import ConfigError

__all__ = ["add_parser"]


def add_parser(subparsers: Any) -> None:
    """Add `sidecar` to the main parser's ``subparsers``."""
    parser = subparsers.add_parser(
        "sidecar",
        help="expose balance metrics of the ranks on this host",
        description="Read what the ranks of a balanced server write to shared memory and serve it "
        "over HTTP. A server starts its own; this is for running one apart from it.",
    )
    if find_spec("fastapi") is None:
        parser.set_defaults(run=_refuse, passes_flags_on=True)
        return
    from ultraep_serve.sidecar.serve import add_arguments
    from ultraep_serve.sidecar.serve import run as serve

    add_arguments(parser)
    parser.set_defaults(run=serve)


def _refuse(_arguments: argparse.Namespace) -> int:
    raise ConfigError("the sidecar needs its packages; pip install 'ultraep-serve[sidecar]'")
