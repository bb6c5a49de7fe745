"""Why an engine did not come up is said once more where its log ends.

What a rank raises is followed in the log by the errors of the processes that waited for it. So the
process that was started first says the reason again when it ends.
"""

import contextlib
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultraep_serve.errors import FabricError, UltraEPError
from ultraep_serve.system.environment import claim_first_process, first_process
from ultraep_serve.system.files import open_regular
from ultraep_serve.system.topology import is_process_alive

_MAX_BYTES = 1 << 16


def say(line: str, *, is_error: bool = False) -> None:
    """Write ``line`` to standard error, whatever the engine does with loggers."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it is full, or closed
        sys.stderr.write(f"ultraep: {'error: ' if is_error else ''}{line}\n")
        sys.stderr.flush()


def repeat_at_exit() -> None:
    """Have the process that was started first say that reason when it ends.

    Finalizers run last created first, so the engine, which is started later, has ended its ranks
    by then. ``atexit`` would call this while they live.
    """
    claim_first_process()
    if first_process() == os.getpid():
        weakref.finalize(repeat_now, repeat_now)  # which lives as long as the process
        _remove_stale_reasons()


@contextmanager
def repeated_at_exit() -> Iterator[None]:
    """Repeat an error of ours that is raised within when the first process ends."""
    try:
        yield
    except UltraEPError as error:
        with contextlib.suppress(OSError):  # the log has it in any case
            _leave(error)
        raise


def _leave(error: UltraEPError) -> None:
    """Leave the reason of ``error``; a rank that lost another one does not replace that one's."""
    path = _path(first_process())
    if isinstance(error, FabricError) and path.exists():
        return
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT), "w") as file:
        if os.fstat(file.fileno()).st_uid == os.getuid():
            file.truncate(0)
            file.write(str(error))


def is_refused() -> bool:
    """Whether this is the process that was started first, and a reason has been left for it."""
    return first_process() == os.getpid() and _path(os.getpid()).exists()


def repeat_now() -> None:
    """Say the reason that was left for this process, once."""
    path = _path(os.getpid())
    with contextlib.suppress(OSError):
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                reason = file.read(_MAX_BYTES).decode(errors="replace")
                say(reason, is_error=True)
        path.unlink()


def _remove_stale_reasons() -> None:
    """Remove reasons of ranks that failed after their first process had ended."""
    for path in _path(0).parent.glob(f"{_path(0).name[:-1]}*"):
        process = path.name.rpartition("-")[2]
        if process.isdecimal() and not is_process_alive(int(process)):
            with contextlib.suppress(OSError):
                path.unlink()


def _path(process: int) -> Path:
    return Path(tempfile.gettempdir()) / f"ultraep-{os.getuid()}-refused-{process}"
