"""The sidecar's process, which a run's primary rank starts beside it."""

import os
import subprocess
import sys
from importlib.util import find_spec

from ultraep_serve.config import BalanceConfig, SidecarSettings
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.machine import address_of, why_not_listen


def start_beside_rank(config: BalanceConfig, settings: SidecarSettings) -> None:
    """Start the sidecar of ``config``'s run directory, which ends with this rank.

    Raises ConfigError where it cannot listen, or where its packages are not installed.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"the sidecar needs {' and '.join(missing)}; pip install '.[sidecar]' in a checkout"
        )
    port = settings.port_beside()
    if reason := why_not_listen(settings.host, port):
        raise ConfigError(
            f"the sidecar cannot listen on {address_of(settings.host, port)} ({reason}); choose "
            'another with "sidecar": {"port": N}'
        )
    subprocess.run(_command(config, settings, port), stdin=subprocess.DEVNULL, check=True)


def _command(config: BalanceConfig, settings: SidecarSettings, port: int) -> list[str]:
    command = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", str(config.run_path)]
    command += ["--host", settings.host, "--port", str(port), "--parent", str(os.getpid())]
    return command + (["--allowed-hosts", settings.allowed_hosts] if settings.allowed_hosts else [])
