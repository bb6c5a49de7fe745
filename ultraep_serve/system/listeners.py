"""Who listens on a port of this machine, as far as /proc shows it to this user."""

import ipaddress
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"


def listening_processes(port: int) -> list[int]:
    """Ids of the processes that listen on TCP ``port``, as far as that is to be seen.

    Processes of other users show their sockets to root alone, those of other containers to nobody.
    """
    sockets = _sockets(port)
    processes = _PROC.glob("[0-9]*") if sockets else ()
    return [int(process.name) for process in processes if _held(process, sockets)]


def listening_addresses(port: int, process: int) -> list[str]:
    """Addresses by which this machine reaches ``process``, as far as it listens on TCP ``port``."""
    sockets = _sockets(port)
    return sorted({_reached_by(sockets[link]) for link in _held(_PROC / str(process), sockets)})


def listener(port: int) -> str | None:
    """Process id and command of who listens on TCP ``port``; None where that is not to be seen."""
    for process in listening_processes(port):
        with suppress(OSError):
            command = (_PROC / str(process) / "comm").read_text(errors="replace").strip()
            return f"process {process} ({command})"
    return None


def _sockets(port: int) -> dict[str, str]:
    """Addresses of the sockets that listen on ``port``, as the kernel writes them, by link."""
    found = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                address, _, number = local.rpartition(":")
                if state == _LISTENING and int(number, 16) == port:
                    found[f"socket:[{inode}]"] = address
    return found


def _held(process: Path, sockets: Iterable[str]) -> list[str]:
    """Those of ``sockets`` that ``process`` has open."""
    found = []
    with suppress(OSError):  # it has ended, or is another user's
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                found.append(str(link.readlink()))
    return [link for link in found if link in sockets]


def _reached_by(written: str) -> str:
    """The address that is ``written`` in words of the machine's byte order; loopback for any."""
    words = (int(written[at : at + 8], 16) for at in range(0, len(written), 8))
    address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address)
