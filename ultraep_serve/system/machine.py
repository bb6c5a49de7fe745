"""Facts about this machine: what it is, how much memory is left, which ports are free."""

import os
import platform
import random
import socket
from pathlib import Path
from typing import Any

__all__ = [
    "available_memory",
    "describe",
    "free_port",
    "groups_sessions",
    "is_here",
    "why_not_listen",
]

_FIRST_PORT = 10_000
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def describe() -> dict[str, Any]:
    """The machine that this process runs on, to publish beside figures."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "sched_autogroup": groups_sessions(),
    }


def groups_sessions(setting: Path = _AUTOGROUP) -> bool | None:
    """Whether Linux shares its cores out by session before it does by process.

    None where the kernel cannot, or no one may know.
    """
    try:
        return setting.read_text().strip() == "1"
    except OSError:
        return None


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of host memory that can be had without swapping; None where unknown."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


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


def why_not_listen(host: str, port: int) -> str | None:
    """What keeps a server from listening on ``port`` of ``host``; None: nothing does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
        except (OverflowError, TypeError, UnicodeError) as error:  # no port, no host name
            return str(error)
    return None


def is_here(host: str) -> bool:
    """Whether ``host`` is a name or address of this machine: one that a server could listen on."""
    return why_not_listen(host, 0) is None


def _cpu_model() -> str:
    """From /proc/cpuinfo where there is one: ``platform`` says little on Linux."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
