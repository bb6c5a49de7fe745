"""Text of others, for a terminal."""

from typing import Any


def printable(value: Any) -> Any:
    """``value`` of JSON, or an error's text, with what a terminal would obey written as escapes."""
    if isinstance(value, str):
        return "".join(_shown(character) for character in value)
    if isinstance(value, dict):
        return {printable(name): printable(part) for name, part in value.items()}
    return [printable(part) for part in value] if isinstance(value, list) else value


def _shown(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()
