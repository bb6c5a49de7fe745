"""The small files of a run directory: settings, pause, and why a server is not balanced."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ultraep_serve.system.files import open_regular, write_whole
from ultraep_serve.telemetry.run_directory import (
    CONFIG_FILE,
    UNBALANCED_FILE,
    running_run_directories,
)
from ultraep_serve.types import Policy

__all__ = [
    "forget_pause",
    "paused_policy",
    "read_config",
    "read_unbalanced",
    "remember_pause",
]

_PAUSED_FILE = "paused"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_REASON_BYTES = 4096


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The settings at start without secrets; None where the file is missing or damaged."""
    try:
        with os.fdopen(open_regular(run_dir / CONFIG_FILE), "rb") as file:
            settings = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(settings, dict):
        return None
    return {key: value for key, value in settings.items() if "token" not in key.lower()}


def read_unbalanced(run_dir: Path, known: str = "") -> str:
    """Why the server of ``run_dir`` runs without balancing; empty where nothing says so.

    ``known`` is the last answer, which stays where the file was deleted from a run that goes on.
    """
    try:
        with os.fdopen(open_regular(run_dir / UNBALANCED_FILE), "rb") as file:
            text = file.read(_MAX_REASON_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return known if known and _is_running(run_dir) else ""
    except OSError:
        return known
    return " ".join(text.split()) or "no reason is given"


def _is_running(run_dir: Path) -> bool:
    try:
        return run_dir in running_run_directories()
    except OSError:  # no descriptor is left: nothing says that it has ended
        return True


def paused_policy(run_dir: Path) -> Policy | None:
    """The policy to resume; None while not paused, or where the file is damaged."""
    try:
        with os.fdopen(open_regular(run_dir / _PAUSED_FILE), "rb") as file:
            return Policy(file.read(64).decode("ascii"))
    except (OSError, ValueError):
        return None


def remember_pause(run_dir: Path, policy: Policy) -> None:
    """Store ``policy`` as the one to resume. Raises OutputError."""
    write_whole(run_dir / _PAUSED_FILE, policy.value.encode())


def forget_pause(run_dir: Path) -> None:
    """End a pause."""
    with contextlib.suppress(OSError):
        (run_dir / _PAUSED_FILE).unlink()
