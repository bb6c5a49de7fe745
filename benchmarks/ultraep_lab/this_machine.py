"""The machine that a benchmark runs on: what to publish beside figures, and a port to serve on."""

import os
import platform
import random
import socket
from pathlib import Path
from typing import Any

_FIRST_PORT = 10_000
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CPUS = Path("/proc/cpuinfo")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def describe() -> dict[str, Any]:
    """The machine that this process runs on, to publish beside figures."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "sched_autogroup": _groups_sessions(),
    }


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection will be given later.

    Raises OSError where none can be found.
    """
    try:
        first_ephemeral = int(_EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = 32_768
    last = max(first_ephemeral, _FIRST_PORT + 1_000)
    for port in random.sample(range(_FIRST_PORT, last), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port between {_FIRST_PORT} and {last} is free")


def _groups_sessions() -> bool | None:
    """Whether Linux shares its cores out by session before it does by process.

    None where the kernel cannot, or no one may know.
    """
    try:
        return _AUTOGROUP.read_text().strip() == "1"
    except OSError:
        return None


def _cpu_model() -> str:
    """From /proc/cpuinfo where there is one: ``platform`` says little on Linux."""
    if _CPUS.exists():
        for line in _CPUS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
