"""Creating and opening the files of a run directory without trusting what lies there."""

import contextlib
import mmap
import os
import stat
from pathlib import Path

__all__ = ["create_mapped", "map_shared", "open_regular"]


def create_mapped(path: Path, first_page: bytes, size: int) -> mmap.mmap:
    """Create ``path`` (0600, ``size`` bytes, starting with ``first_page``) and map it for writing.

    The file appears under its name complete, replacing an older one: readers never see half a
    header. Raises OSError, also when the file system has no room: the pages are claimed here,
    because a page missing later would be a fatal signal in the writer.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()  # left by a dead process that had the same id
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, first_page, 0)
        mapped = mmap.mmap(descriptor, size)
        temporary.rename(path)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    return mapped


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of ``path``. Raises OSError, also for links, pipes, devices and directories."""
    # O_NONBLOCK: opening a pipe must not wait for its other end.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def map_shared(path: Path, size: int) -> mmap.mmap:
    """Map the first ``size`` bytes of ``path`` for reading and writing. Raises OSError."""
    descriptor = open_regular(path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_size < size:
            raise OSError(f"{path} is shorter than {size} bytes")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
