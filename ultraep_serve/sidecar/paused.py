"""Pausing: the policy is off, and which one to resume is remembered beside the control page.

In a file, so that a sidecar that is restarted still knows.
"""

import contextlib
import os
from pathlib import Path

from ultraep_serve.observability._files import open_regular
from ultraep_serve.types import Policy

__all__ = ["forget_pause", "paused_policy", "remember_pause"]

_NAME = "paused"


def paused_policy(run_dir: Path) -> Policy | None:
    """What to resume; None while not paused, and where the file is not one of ours."""
    try:
        with os.fdopen(open_regular(run_dir / _NAME), "rb") as file:
            return Policy(file.read(64).decode("ascii"))
    except (OSError, ValueError):
        return None


def remember_pause(run_dir: Path, policy: Policy) -> None:
    """Note that ``policy`` is to be resumed. Raises OSError."""
    temporary = run_dir / f".{_NAME}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
        file.write(policy.value)
    temporary.rename(run_dir / _NAME)


def forget_pause(run_dir: Path) -> None:
    """Nothing is paused any more."""
    with contextlib.suppress(OSError):
        (run_dir / _NAME).unlink()
