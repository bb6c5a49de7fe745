"""Who listens on a port of this machine, as far as /proc shows it to this user."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["listener", "listening_processes"]

_LISTENING = "0A"


def listening_processes(port: int, proc: Path = Path("/proc")) -> list[int]:
    """Ids of the processes that listen on TCP ``port``, as far as that is to be seen.

    Processes of other users show their sockets to root alone, those of other containers to nobody.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(port, proc)}
    found = []
    for process in proc.glob("[0-9]*") if wanted else ():
        with suppress(OSError):  # it has ended, or is another user's
            if any(_target(link) in wanted for link in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def listener(port: int, proc: Path = Path("/proc")) -> str | None:
    """Process id and command of who listens on TCP ``port``; None where that is not to be seen."""
    for process in listening_processes(port, proc):
        with suppress(OSError):
            command = (proc / str(process) / "comm").read_text(errors="replace").strip()
            return f"process {process} ({command})"
    return None


def _inodes(port: int, proc: Path) -> Iterator[str]:
    """The sockets that listen on ``port`` of any address."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    yield inode


def _target(link: Path) -> str:
    with suppress(OSError):  # it was closed meanwhile
        return str(link.readlink())
    return ""
