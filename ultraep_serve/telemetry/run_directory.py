"""The directory in shared memory that the processes of one run share.

The launcher makes one, named after the server's port; ranks that were started without a launcher
make one themselves. It belongs to the processes that hold its lock, which is on the directory
itself: deleting files in it frees nothing. A directory whose lock is free is left over from a run
that was killed; the next start removes it.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from ultraep_serve.errors import ConfigError, SharedMemoryError
from ultraep_serve.system.files import open_own_directory, open_regular
from ultraep_serve.system.topology import process_namespace

__all__ = [
    "SHARED_MEMORY",
    "RunDirectory",
    "abandoned_run_directories",
    "hold",
    "is_running",
    "name_of_run",
    "remove_abandoned",
    "remove_run_directories",
    "run_directory",
    "run_directory_of_port",
    "running_run_directories",
]

SHARED_MEMORY = Path("/dev/shm")
_NETWORK_FILE = "network"  # the number of the network namespace whose port a run is named after
_LOCK_SECONDS = 5.0  # for other processes to let go; they need milliseconds
_held_again: dict[Path, int] = {}  # this process's locks on directories that ``hold`` made sure of


class RunDirectory:
    """A run directory, and this process's lock on it. Use ``create`` or ``join``."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        _held.add(self)

    @classmethod
    def create(cls, name: str) -> "RunDirectory":
        """Make a directory (mode 0700), after abandoned ones were removed.

        Raises ConfigError where a run of this user has that ``name``, and OSError.
        """
        path = _path_of(name)
        with _one_start_at_a_time():
            _remove_abandoned()
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                whose = "belongs to a run of this user already"
                if not _is_own(path):
                    whose = "is not a directory of this user's; remove it"
                raise ConfigError(f"{path} {whose}") from None
            return cls(path, _locked(path))

    @classmethod
    def join(cls, name: str) -> "RunDirectory":
        """Join what another process created. Raises ConfigError where it is gone."""
        path = _path_of(name)
        with _one_start_at_a_time():  # whoever looks whether it is held locks it for a moment
            try:
                return cls(path, _locked(path))
            except OSError as error:
                raise ConfigError(f"{path} cannot be used ({error.strerror})") from error

    def leave(self) -> None:
        """Give the lock back. The last process to leave removes the directory."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        # Without the order the directory is left over, and the next start removes it.
        with contextlib.suppress(SharedMemoryError), _one_start_at_a_time():
            os.close(lock)
            lock = -1
            _let_go(self.path)
            if not _is_held(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
            _let_go(self.path)


def _let_go_in_fork() -> None:
    """A lock belongs to the process that took it: a fork would hold it when that one is killed."""
    for directory in _held:
        if directory._lock >= 0:
            os.close(directory._lock)
            directory._lock = -1
    while _held_again:
        os.close(_held_again.popitem()[1])


_held: "weakref.WeakSet[RunDirectory]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_let_go_in_fork)


def hold(path: Path) -> None:
    """Make the run directory ``path`` again where somebody deleted it, and keep a lock on it.

    Only directories of this user in shared memory; others are left as they are. The lock is given
    back by ``RunDirectory.leave``, or when this process ends. Raises OSError.
    """
    if path.parent != SHARED_MEMORY or not path.name.startswith(_path_of("").name):
        return
    with _one_start_at_a_time():
        path.mkdir(mode=0o700, exist_ok=True)
        lock = _locked(path)
        _let_go(path)
        _held_again[path] = lock


def _let_go(path: Path) -> None:
    lock = _held_again.pop(path, None)
    if lock is not None:
        os.close(lock)


def run_directory_of_port(port: int) -> Path:
    """Where the launcher of the server on ``port`` of this user keeps its directory.

    Containers that share memory may have ports of their own: where the name is that of a server in
    another network, it is followed by the number of this one.
    """
    path, number = _path_of(str(port)), str(_network_namespace())
    own = path.with_name(f"{path.name}-{number}")
    return own if own.exists() or _network_of(path) not in ("", number) else path


def _network_of(path: Path) -> str:
    """The number of the network namespace that the run is in; empty where that is not known."""
    try:
        with os.fdopen(open_regular(path / _NETWORK_FILE), "rb") as file:
            return file.read(32).decode("ascii", errors="replace")
    except OSError:
        return ""


def _network_namespace() -> int:
    """Which network's ports this process sees; 0 where that is not known."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def run_directory(port: int) -> Iterator[Path]:
    """A fresh run directory (mode 0700) for the server on ``port``, removed at the end.

    Raises ConfigError when a server of this user already runs there.
    """
    try:
        directory = RunDirectory.create(run_directory_of_port(port).name[len(_path_of("").name) :])
    except ConfigError as error:
        raise ConfigError(
            f"a balanced server on port {port} is running already ({error}); "
            "stop it or choose another --port"
        ) from None
    try:
        (directory.path / _NETWORK_FILE).write_text(str(_network_namespace()))
        yield directory.path
    finally:
        directory.leave()


def abandoned_run_directories() -> list[Path]:
    """Directories of this user's runs that were killed; the next start removes them."""
    with _one_start_at_a_time():
        return _abandoned()


def running_run_directories() -> list[Path]:
    """Directories of this user's runs, sorted by name."""
    with _one_start_at_a_time():
        return [path for path in _own() if _is_held(path)]


def name_of_run(process: int, number: int) -> str:
    """Name of a run without a launcher: its first process, and a random ``number`` of 63 bits.

    Process ids alone are not unique where containers share memory: their namespace is named too.
    """
    return f"{_runs_of(process)}{number:016x}"


def _runs_of(process: int) -> str:
    return f"p{process}-{process_namespace():x}-"


def remove_run_directories(process: int, seconds: float) -> None:
    """Remove those of ``process``'s runs as soon as nobody holds them, within ``seconds``."""
    deadline = time.monotonic() + seconds
    while left := _own(_runs_of(process)):
        with contextlib.suppress(SharedMemoryError), _one_start_at_a_time():
            for path in left:
                if not _is_held(path):
                    shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def remove_abandoned() -> None:
    """Remove what killed runs of this user left."""
    with _one_start_at_a_time():
        _remove_abandoned()


def is_running(port: int) -> bool:
    """Whether a balanced server of this user holds the run directory of ``port``."""
    with _one_start_at_a_time():
        return _is_held(run_directory_of_port(port))


@contextlib.contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Otherwise a start could take a directory that is not locked yet for an abandoned one.

    Raises SharedMemoryError where another process, of any user, does not let go of the lock.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    directory = os.open(SHARED_MEMORY, flags)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(directory):
            if time.monotonic() > deadline:
                raise SharedMemoryError(
                    f"{_holder(directory)} keeps {SHARED_MEMORY} locked, so that no balanced "
                    "server can start; end it (fuser shows processes that have it open)"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(directory)


def _try_lock(directory: int) -> bool:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(directory: int) -> str:
    """The process that locks it, where the kernel shows that here."""
    status = os.fstat(directory)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, locked, *_ = line.split()
            if (kind, locked) == ("FLOCK", file) and int(process) > 0:
                return f"process {process}"
    return "another process"


def _path_of(name: str) -> Path:
    return SHARED_MEMORY / f"ultraep-{os.getuid()}-{name}"


def _own(beginning: str = "") -> list[Path]:
    """Directories that are this user's; others may make entries of such names too."""
    return sorted(filter(_is_own, SHARED_MEMORY.glob(f"{_path_of(beginning).name}*")))


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _abandoned() -> list[Path]:
    return [path for path in _own() if not _is_held(path)]


def _remove_abandoned() -> None:
    for path in _abandoned():
        shutil.rmtree(path, ignore_errors=True)


def _locked(path: Path) -> int:
    """A descriptor that holds a lock on ``path`` together with other processes'."""
    lock = open_own_directory(path)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def _is_held(path: Path) -> bool:
    """Whether a process holds ``path``, or that cannot be found out now."""
    try:
        lock = open_own_directory(path)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
