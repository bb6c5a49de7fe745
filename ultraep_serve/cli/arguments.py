"""What several commands have in common: types of flags, flags, the control token, and output."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ultraep_serve.balance.speeds import parse_speeds
from ultraep_serve.config import control_token_from_environment
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.control_token import checked_token, read_token
from ultraep_serve.system.files import prepare_output, read_text, whole_file, write_json
from ultraep_serve.telemetry.run_directory import run_directory_of_port
from ultraep_serve.telemetry.run_files import RunFiles

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "add_json_argument",
    "add_server_arguments",
    "built",
    "control_token",
    "names",
    "number",
    "numbers",
    "prepare_outputs",
    "seconds",
    "show",
    "speeds",
    "write_pictures",
]

Made = TypeVar("Made")
_WEEK = 7 * 24 * 3600


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Type of a flag: a whole number in a range."""
    valid = f"{least} or more" if most is None else f"{least} to {most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text} must be a whole number, {valid}")
        return value

    return convert


def numbers(least: int = 1, most: int | None = None) -> Callable[[str], tuple[int, ...]]:
    """Type of a flag: whole numbers in a range, separated by commas, each counted once."""
    convert = number(least, most)
    return lambda text: tuple(dict.fromkeys(map(convert, names(text) or [text])))


def seconds(text: str) -> float:
    """Type of a flag: a time above 0, at most a week."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _WEEK:
        raise argparse.ArgumentTypeError(f"{text} must be seconds, more than 0, at most {_WEEK}")
    return value


def speeds(text: str) -> tuple[float, ...]:
    """Type of a flag: one number per rank, above 0 and at most 1; () for ``equal``."""
    try:
        return parse_speeds(text, words=("equal",))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def names(text: str) -> list[str]:
    """Type of a flag: words separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def built(kind: type[Made], arguments: argparse.Namespace) -> Made:
    """A dataclass from flags that have the names of its fields."""
    given: list[Any] = list(fields(kind))  # type: ignore[arg-type]
    return kind(**{field.name: getattr(arguments, field.name) for field in given})


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """The flag that ``show`` gets."""
    text = "write the result to FILE as JSON; - prints it instead of the table"
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)


def prepare_outputs(*paths: Path | None) -> None:
    """Before the work, find out whether these can be written. Raises OutputError."""
    for path in paths:
        if path is not None and path != Path("-"):
            prepare_output(path)


def show(document: Mapping[str, Any], view: "RenderableType", path: Path | None) -> None:
    """Write ``document`` where --json says, and print ``view`` for people."""
    if path == Path("-"):
        print(json.dumps(document, indent=2))
        return
    if path is not None:
        write_json(path, document)
    if isinstance(view, str):
        print(view)
        return
    from rich.console import Console  # not where the doctor runs without it

    Console().print(view)


def write_pictures(directory: Path, pictures: Mapping[str, bytes]) -> None:
    """Everything is complete by now; each file appears whole or not at all."""
    for name, content in pictures.items():
        with whole_file(directory / name) as part:
            part.write_bytes(content)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The addresses of a running server and its sidecar, and what ``control_token`` reads."""
    engine, sidecar = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
    parser.add_argument("--url", default=engine, help="address of the engine's server")
    parser.add_argument("--sidecar", metavar="URL", default=sidecar, help="address of its sidecar")
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--token",
        help="the sidecar's control token (default: $ULTRAEP_CONTROL_TOKEN, or the token of the "
        "server at --url where that runs on this machine)",
    )
    token.add_argument("--token-file", type=Path, metavar="FILE", help="file with that token")


def control_token(arguments: argparse.Namespace) -> str | None:
    """The given token, or the one that a server on this machine left in its run directory.

    Raises ConfigError when its file cannot be read, or others could have written that directory.
    """
    if arguments.token:
        return checked_token(arguments.token, "--token")
    if token := control_token_from_environment():
        return token
    if path := arguments.token_file:
        return checked_token(read_text(path, "--token-file"), f"--token-file {path}")
    return _local_token(arguments.url)


def _local_token(url: str) -> str | None:
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"--url = {url!r} is not an address: {error}") from error
    path = RunFiles(run_directory_of_port(port)).token if port else None
    return read_token(path) if path is not None and os.path.lexists(path) else None
