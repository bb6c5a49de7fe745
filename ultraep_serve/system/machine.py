"""Facts about this machine: what it is, how much memory is left, which ports are free."""

import errno
import os
import platform
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ultraep_serve.system.listeners import listener

__all__ = [
    "address_of",
    "available_memory",
    "describe",
    "free_port",
    "groups_sessions",
    "has_amx",
    "is_here",
    "why_not_listen",
]

_FIRST_PORT = 10_000
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CPUS = Path("/proc/cpuinfo")
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_CONTROL_GROUP = Path("/proc/self/cgroup")
_MEMORY_FILES = (  # limit, use, and which line of memory.stat: versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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


def has_amx() -> bool:
    """Whether cores multiply matrices in tiles (AMX); yes, where nobody may know."""
    return not _CPUS.exists() or "amx_tile" in _CPUS.read_text(errors="replace")


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), control_groups: Path = _CONTROL_GROUPS
) -> int | None:
    """Bytes that this process may still take without swapping; None where unknown.

    By the machine, and by the limit of every control group that it is in, a container's among them.
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
    """The tops, which are the container's where there is one, and those on the way to ours."""
    tops = {"": root, "memory": root / "memory"}  # by controller: version 2, and 1
    yield from tops.values()
    with suppress(OSError):
        for line in _OWN_CONTROL_GROUP.read_text().splitlines():
            _, controller, path = line.split(":", 2)
            if controller in tops and ".." not in (parts := PurePosixPath(path).parts):
                top = tops[controller]
                yield from (top.joinpath(*parts[1:end]) for end in range(2, len(parts) + 1))


def _free_in_group(group: Path) -> int | None:
    """What is left of the group's limit; file caches that the kernel would drop count as free."""
    for limit, use, cache in _MEMORY_FILES:
        # There is none, or its limit is "max".
        with suppress(OSError, ValueError):
            free = int((group / limit).read_text()) - int((group / use).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            counters = dict(line.split() for line in lines)
            return max(0, free + int(counters.get(cache, 0)))
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
    """What keeps a server from listening on ``port`` of ``host``; None: nothing does.

    Where the port is taken, that says by whom, if it can be seen.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            owner = listener(port) if error.errno == errno.EADDRINUSE else None
            return f"{error.strerror} by {owner}" if owner else error.strerror
        except (OverflowError, TypeError, UnicodeError) as error:  # no port, no host name
            return str(error)
    return None


def address_of(host: str, port: int) -> str:
    """``host`` and ``port`` as an address is written: one of IPv6 has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_here(host: str) -> bool:
    """Whether ``host`` is a name or address of this machine: one that a server could listen on."""
    return why_not_listen(host, 0) is None


def _cpu_model() -> str:
    """From /proc/cpuinfo where there is one: ``platform`` says little on Linux."""
    if _CPUS.exists():
        for line in _CPUS.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
