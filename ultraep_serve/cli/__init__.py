"""The command line, `ultraep-serve`: one module per command, imported when the command is given.

Other packages add commands by the entry point group ``ultraep_serve.commands``.
"""

import argparse
import os
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, NoReturn

from ultraep_serve import __version__
from ultraep_serve.errors import ConfigError, UltraEPError
from ultraep_serve.system.versions import installed_engines

_INTERRUPTED = 130  # exit code of a process that Ctrl-C ended
_NO_READER = 141  # and of one whose output nobody reads, by SIGPIPE
_OTHERS = "ultraep_serve.commands"  # entry points of mappings like the next
_COMMANDS = {  # name: module with add_arguments and run, help
    "vllm": ("ultraep_serve.cli.serve", "serve a model with vLLM and balancing"),
    "sglang": ("ultraep_serve.cli.serve", "serve a model with SGLang and balancing"),
    "sidecar": (
        "ultraep_serve.sidecar.serve",
        "serve metrics of the ranks on this host; a server starts its own sidecar",
    ),
    "status": ("ultraep_serve.cli.status", "show how balanced a running server is"),
    "doctor": ("ultraep_serve.cli.doctor", "check this machine, the engine and a running server"),
}


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)


class _Versions(argparse.Action):
    """Says which ultraep-serve this is, which engines are there, and whether they are verified."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        engines = [str(engine) for engine in installed_engines()] or ["no engine is installed here"]
        print(f"ultraep-serve {__version__}", *engines, sep="\n")
        parser.exit()


def main(words: list[str] | None = None) -> int:
    """Run one command; returns its exit code.

    What goes wrong is one line on standard error: our own errors, those of the operating system,
    Ctrl-C. Any other exception is a mistake of this package, and is not caught.
    """
    try:
        try:
            return execute(sys.argv[1:] if words is None else words)
        finally:
            _flush()  # not when the interpreter ends, where no error is one line
    except BrokenPipeError:
        _drop_output()  # its reader wants no more, as `head` does
        return _NO_READER
    except (UltraEPError, OSError) as error:
        _drop_output()
        print(f"ultraep-serve: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ultraep-serve: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _flush() -> None:
    if sys.stdout is not None:  # it was closed before the start
        sys.stdout.flush()


def _drop_output() -> None:
    """Forget what cannot be written to standard output."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(value: Any) -> Any:
    """``value`` of JSON, or an error's text, with what a terminal would obey written as escapes."""
    if isinstance(value, str):
        parts = (c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in value)
        return "".join(parts)
    if isinstance(value, dict):
        return {printable(name): printable(part) for name, part in value.items()}
    return [printable(part) for part in value] if isinstance(value, list) else value


def execute(words: list[str]) -> int:
    """Run one command; returns its exit code. Raises UltraEPError with what to do."""
    parser = _make_parser(words[:1])
    if any("\0" in word for word in words):
        parser.error("no flag may hold a NUL character")
    if not words:
        parser.print_help()
        return 0
    options, engine_flags = parser.parse_known_args(words)
    if engine_flags and not getattr(options, "passes_flags_on", False):
        parser.error(f"unrecognized arguments: {' '.join(engine_flags)}")
    options.engine_flags = engine_flags
    return int(options.run(options))


def all_commands() -> dict[str, tuple[str, str]]:
    commands = dict(_COMMANDS)
    for entry in entry_points(group=_OTHERS):
        commands.update(entry.load())
    return commands


def _make_parser(names: Collection[str]) -> Parser:
    """The parser of all commands, those with ``names`` with their flags."""
    parser = Parser(
        prog="ultraep-serve", description="Real-time expert load balancing for MoE serving."
    )
    parser.add_argument(
        "--version", action=_Versions, nargs=0, help="ours and the engines', and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in all_commands().items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name in names:
            implementation = _imported(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser


def _imported(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        extra = "sidecar" if ".sidecar." in module else "client"
        package = str(missing.name).partition(".")[0]
        raise ConfigError(
            f"{package} is not installed; run `pip install '.[{extra}]'` in a checkout"
        ) from missing
