"""Lines that people are to see, and text of others for a terminal."""

import sys
from contextlib import suppress
from typing import Any


def say(line: str, *, is_error: bool = False) -> None:
    """Write ``line`` to standard error, whatever the engine does with loggers."""
    with suppress(AttributeError, OSError, ValueError):  # it is full, or closed
        sys.stderr.write(f"ultraep: {'error: ' if is_error else ''}{line}\n")
        sys.stderr.flush()


def printable(value: Any) -> Any:
    """``value`` of JSON, or an error's text, with what a terminal would obey written as escapes."""
    if isinstance(value, str):
        return "".join(map(_shown, value))
    if isinstance(value, dict):
        return {printable(name): printable(part) for name, part in value.items()}
    return [printable(part) for part in value] if isinstance(value, list) else value


def _shown(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()
