"""Lines that people are to see whatever the engine does with loggers."""

import sys
from contextlib import suppress


def say(line: str, *, is_error: bool = False) -> None:
    """Write ``line`` to standard error."""
    with suppress(AttributeError, OSError, ValueError):  # it is full, or closed
        sys.stderr.write(f"ultraep: {'error: ' if is_error else ''}{line}\n")
        sys.stderr.flush()
