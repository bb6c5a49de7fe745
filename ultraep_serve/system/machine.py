"""Facts about this machine: what it is, how much memory is left, which ports are free."""

import os
import platform
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
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
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_CONTROL_GROUP = Path("/proc/self/cgroup")


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


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), control_groups: Path = _CONTROL_GROUPS
) -> int | None:
    """Bytes that this process may still take without swapping; None where unknown.

    By the machine, and by the limit of every control group (version 2) that it is in, a container's
    among them.
    """
    found = [_free_on_machine(meminfo), *map(_free_in_group, _own_control_groups(control_groups))]
    return min((free for free in found if free is not None), default=None)


def _free_on_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _own_control_groups(root: Path) -> Iterator[Path]:
    """``root``, which is the container's where there is one, and those below on the way to ours."""
    yield root
    with suppress(OSError):
        for line in _OWN_CONTROL_GROUP.read_text().splitlines():
            if line.startswith("0::") and ".." not in (parts := PurePosixPath(line[3:]).parts):
                yield from (root.joinpath(*parts[1:end]) for end in range(2, len(parts) + 1))


def _free_in_group(group: Path) -> int | None:
    """What is left of the group's limit; file caches that the kernel would drop count as free."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(counters.get("inactive_file", 0)))
    except (OSError, ValueError):  # there is none, or its limit is "max"
        return None


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
