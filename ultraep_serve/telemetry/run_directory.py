"""The directory in shared memory that the processes of one run share.

The ranks of a host make one. It belongs to the processes that hold its lock, which is on the
directory itself: deleting files in it frees nothing. A directory whose lock is free is left over
from a run that was killed; its sidecar or the next start removes it.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from ultraep_serve.errors import ConfigError, NoServerError, SharedMemoryError
from ultraep_serve.system.files import open_own_directory
from ultraep_serve.system.listeners import listening_processes
from ultraep_serve.system.topology import process_namespace

SHARED_MEMORY = Path("/dev/shm")
_START = "start one with `ultraep-serve vllm MODEL` (or sglang)"
_LOCK_SECONDS = 5.0  # for other processes to let go; they need milliseconds


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
            if not _is_held(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _let_go_in_fork() -> None:
    """A lock belongs to the process that took it: a fork would hold it when that one is killed."""
    for directory in _held:
        if directory._lock >= 0:
            os.close(directory._lock)
            directory._lock = -1


_held: "weakref.WeakSet[RunDirectory]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_let_go_in_fork)


def running_run_directories() -> list[Path]:
    """Directories of this user's runs, sorted by name."""
    with _one_start_at_a_time():
        return [path for path in _own() if _is_held(path)]


def find_run(run_dir: Path | None = None, port: int | None = None) -> Path:
    """``run_dir``, or the run directory of the server on ``port``, or of the only one that runs.

    Raises NoServerError where there is none, and a list of them where there are several.
    """
    if run_dir is not None:
        if not run_dir.is_dir():
            raise NoServerError(f"{run_dir} is not the run directory of a server; {_START}")
        return run_dir
    running = running_run_directories()
    if port is not None:
        processes = listening_processes(port)
        running = [path for path in running if process_of_run(path) in processes]
        if not running:
            raise NoServerError(
                f"no balanced server of this user answers on port {port} of this machine; {_START}"
            )
    if not running:
        raise NoServerError(f"no balanced server of this user runs on this machine; {_START}")
    if len(running) > 1:
        listed = "\n".join(f"  {path}" for path in running)
        raise NoServerError(
            f"{len(running)} balanced servers run on this machine; choose one with --run-dir:\n"
            f"{listed}"
        )
    return running[0]


def name_of_run(process: int, number: int) -> str:
    """Name of a run: its first process, and a random ``number`` of 63 bits.

    Process ids alone are not unique where containers share memory: their namespace is named too.
    """
    return f"p{process}-{process_namespace():x}-{number:016x}"


def process_of_run(path: Path) -> int | None:
    """The first process of a run; None where that is in another namespace of processes."""
    name = rf"ultraep-{os.getuid()}-p(\d+)-{process_namespace():x}-.*"
    found = re.fullmatch(name, path.name)
    return int(found[1]) if found else None


def remove_when_left(path: Path, seconds: float) -> None:
    """Remove a run directory as soon as nobody holds it, within ``seconds``; and abandoned ones."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(SharedMemoryError):
        while path in running_run_directories() and time.monotonic() < deadline:
            time.sleep(0.2)
        remove_abandoned()


def remove_abandoned() -> None:
    """Remove what killed runs of this user left."""
    with _one_start_at_a_time():
        _remove_abandoned()


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


def _own() -> list[Path]:
    """Directories that are this user's; others may make entries of such names too."""
    return sorted(filter(_is_own, SHARED_MEMORY.glob(_path_of("*").name)))


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove_abandoned() -> None:
    for path in _own():
        if not _is_held(path):
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
