"""On the path of the injector's processes: a wall clock that the injector sets."""

import os
import time

_FILE = os.environ.get("FAULTS_CLOCK", "")
_time, _time_ns = time.time, time.time_ns


def _ahead() -> int:
    """Seconds that the clock is ahead."""
    try:
        with open(_FILE) as file:
            return int(file.read() or 0)
    except (OSError, ValueError):
        return 0


if _FILE:
    time.time = lambda: _time() + _ahead()
    time.time_ns = lambda: _time_ns() + _ahead() * 10**9
