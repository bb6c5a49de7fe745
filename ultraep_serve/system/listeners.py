"""Who listens on a port of this machine, as far as /proc shows it to this user."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

__all__ = ["listener", "listening_addresses", "listening_processes"]

_LISTENING = "0A"


def listening_processes(port: int, proc: Path = Path("/proc")) -> list[int]:
    """Ids of the processes that listen on TCP ``port``, as far as that is to be seen.

    Processes of other users show their sockets to root alone, those of other containers to nobody.
    """
    wanted = {f"socket:[{inode}]" for _, inode in _sockets(port, proc)}
    found = []
    for process in proc.glob("[0-9]*") if wanted else ():
        with suppress(OSError):  # it has ended, or is another user's
            if any(_target(link) in wanted for link in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def listening_addresses(port: int, proc: Path = Path("/proc")) -> list[str]:
    """The addresses of this machine at which TCP ``port`` is listened on."""
    words = ([host[i : i + 8] for i in range(0, len(host), 8)] for host, _ in _sockets(port, proc))
    return [str(ip_address(b"".join(map(_in_order, host)))) for host in words]


def _in_order(word: str) -> bytes:
    """Four bytes of an address, which the kernel shows as a number of this machine's."""
    return int(word, 16).to_bytes(4, sys.byteorder)


def listener(port: int, proc: Path = Path("/proc")) -> str | None:
    """Process id and command of who listens on TCP ``port``; None where that is not to be seen."""
    for process in listening_processes(port, proc):
        with suppress(OSError):
            command = (proc / str(process) / "comm").read_text(errors="replace").strip()
            return f"process {process} ({command})"
    return None


def _sockets(port: int, proc: Path) -> Iterator[tuple[str, str]]:
    """Address, in hexadecimal digits, and inode of each socket that listens on ``port``."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                host, _, number = local.partition(":")
                if state == _LISTENING and int(number, 16) == port:
                    yield host, inode


def _target(link: Path) -> str:
    with suppress(OSError):  # it was closed meanwhile
        return str(link.readlink())
    return ""
