"""Waiting for what another process or thread is about to do."""

import time
from collections.abc import Callable


def until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    """Returns once it is true; AssertionError where it does not come about in time."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)
