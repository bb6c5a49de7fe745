"""``ultraep-serve completion SHELL``: what a shell completes our commands and flags with."""

import argparse

import shtab

from ultraep_serve.cli import make_parser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command to ``parser``."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")


def run(options: argparse.Namespace) -> int:
    """Print the script; engines' own flags are not in it. Returns 0."""
    print(shtab.complete(make_parser(), options.shell))
    return 0
