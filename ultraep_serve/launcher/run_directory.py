"""The directory in shared memory that the processes of one server share.

It belongs to the process that holds the lock in it. A directory whose lock is free is left over
from a server that was killed; the next start removes it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultraep_serve.errors import ConfigError

__all__ = [
    "TOKEN_FILE",
    "abandoned_run_directories",
    "is_running",
    "run_directory",
    "run_directory_of_port",
]

TOKEN_FILE = "token"
_SHARED_MEMORY = Path("/dev/shm")
_LOCK_FILE = "lock"


def run_directory_of_port(port: int) -> Path:
    """Where the server on ``port`` of this host and user keeps its run directory."""
    return _SHARED_MEMORY / f"ultraep-{os.getuid()}-{port}"


@contextmanager
def run_directory(port: int) -> Iterator[Path]:
    """A fresh run directory (mode 0700) for the server on ``port``, removed at the end.

    Raises ConfigError when a server of this user already runs there.
    """
    path = run_directory_of_port(port)
    with _one_start_at_a_time():
        _remove_abandoned()
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            raise ConfigError(
                f"a balanced server on port {port} is running already ({path}); "
                "stop it or choose another --port"
            ) from None
        lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def abandoned_run_directories() -> list[Path]:
    """Directories of this user's servers that were killed; the next start removes them."""
    with _one_start_at_a_time():
        return _abandoned()


def is_running(port: int) -> bool:
    """Whether a balanced server of this user holds the run directory of ``port``."""
    with _one_start_at_a_time():
        return _is_held(run_directory_of_port(port) / _LOCK_FILE)


@contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Otherwise a start could take a directory that is not locked yet for an abandoned one."""
    directory = os.open(_SHARED_MEMORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _remove_abandoned() -> None:
    for path in _abandoned():
        shutil.rmtree(path, ignore_errors=True)


def _abandoned() -> list[Path]:
    own = _SHARED_MEMORY.glob(f"ultraep-{os.getuid()}-*")
    return sorted(path for path in own if not _is_held(path / _LOCK_FILE))


def _is_held(lock_path: Path) -> bool:
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
