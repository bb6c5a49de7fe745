"""Facts about this machine: how much memory is left, and who listens where."""

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ultraep_serve.system.listeners import listener

_CPUS = Path("/proc/cpuinfo")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_CONTROL_GROUP = Path("/proc/self/cgroup")
_MEMORY_FILES = (  # limit, use, and which line of memory.stat: versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_NO_LIMIT = 1 << 62  # version 1 writes the largest number of whole pages in 63 bits


def has_amx() -> bool:
    """Whether cores multiply matrices in tiles (AMX); yes, where nobody may know."""
    return not _CPUS.exists() or "amx_tile" in _CPUS.read_text(errors="replace")


def available_memory(
    meminfo: Path = Path("/proc/meminfo"), control_groups: Path = _CONTROL_GROUPS
) -> int | None:
    """Bytes that this process may still take without swapping; None where unknown.

    By the machine, and by the limit of every control group that it is in, a container's among them.
    """
    groups = filter(None, map(_limit_of_group, _own_control_groups(control_groups)))
    found = [_on_machine(meminfo, "MemAvailable"), *(free for _, free in groups)]
    return min((free for free in found if free is not None), default=None)


def total_memory(
    meminfo: Path = Path("/proc/meminfo"), control_groups: Path = _CONTROL_GROUPS
) -> int:
    """Bytes that all processes here may take together, by the same limits; 0 where unknown."""
    groups = filter(None, map(_limit_of_group, _own_control_groups(control_groups)))
    found = [_on_machine(meminfo, "MemTotal"), *(most for most, _ in groups)]
    return min((most for most in found if most is not None), default=0)


def _on_machine(meminfo: Path, name: str) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
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


def _limit_of_group(group: Path) -> tuple[int, int] | None:
    """The group's limit and what is left of it; file caches that would be dropped count as free."""
    for limit, use, cache in _MEMORY_FILES:
        # There is none, or its limit is "max".
        with suppress(OSError, ValueError):
            most = int((group / limit).read_text())
            if most >= _NO_LIMIT:
                return None
            free = most - int((group / use).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            counters = dict(line.split() for line in lines)
            return most, max(0, free + int(counters.get(cache, 0)))
    return None


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
