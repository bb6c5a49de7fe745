"""What a command is doing and how long it still takes, on a terminal or in a log."""

import sys
import time

_LINE_SECONDS = 10.0  # between lines where output is no terminal


class Progress:
    """One line on standard error: rewritten on a terminal, elsewhere a new one now and then.

    It is written when somebody says something: a thread of its own would take time from the server
    that is measured.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._written = -_LINE_SECONDS  # seconds after that

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def say(self, what: str, left: float | None, *, always: bool = False) -> None:
        """``what`` is being done; all of it takes ``left`` more seconds, where that is known.

        ``always``: also where the last line is of just now.
        """
        line = f"[{_clock(self.seconds)}] {what}"
        line += f", about {_clock(left)} left" if left is not None and left >= 1 else ""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{line}")
        elif always or self.seconds - self._written >= _LINE_SECONDS:
            sys.stderr.write(f"{line}\n")
            self._written = self.seconds
        sys.stderr.flush()

    def end(self) -> None:
        """Leave a terminal's line to others."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02}"
