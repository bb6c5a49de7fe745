"""The sidecar's process, as the launcher starts it, or a run's primary rank where there is none."""

import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec

from ultraep_serve.config import BalanceConfig, SidecarSettings
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.machine import why_not_listen

__all__ = ["sidecar_command", "start_beside_rank"]


def sidecar_command(
    config: BalanceConfig, settings: SidecarSettings, port: int, parent: int | None = None
) -> list[str]:
    """Arguments that serve ``config``'s run directory on ``port``, as long as ``parent`` lives."""
    command = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", str(config.run_path)]
    command += ["--host", settings.host, "--port", str(port)]
    command += ["--allowed-hosts", settings.allowed_hosts] if settings.allowed_hosts else []
    return command if parent is None else [*command, "--parent", str(parent)]


def start_beside_rank(config: BalanceConfig, settings: SidecarSettings) -> None:
    """Start the sidecar as a child of this rank, with which it ends, on any core.

    Raises ConfigError where it cannot listen, or where its packages are not installed.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"the sidecar needs {' and '.join(missing)}; pip install '.[sidecar]' in a checkout"
        )
    port = settings.port_beside()
    if reason := why_not_listen(settings.host, port):
        raise ConfigError(
            f"the sidecar cannot listen on {settings.host}:{port} ({reason}); choose another "
            'with "sidecar": {"port": N}'
        )
    child = subprocess.Popen(
        sidecar_command(config, settings, port, os.getpid()),
        stdin=subprocess.DEVNULL,
    )
    with contextlib.suppress(OSError):  # engines pin ranks to a few cores
        os.sched_setaffinity(child.pid, range(os.cpu_count() or 1))
