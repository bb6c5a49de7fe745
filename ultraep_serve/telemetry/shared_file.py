"""A file of a run that one process writes and others read.

It is read and written by calls, never mapped: a mapped file that somebody truncates kills the
process that touches it, where a call only fails. A file that was deleted is still there for
whoever has it open; its writer puts a copy back under the name.
"""

import contextlib
import os
from pathlib import Path

from ultraep_serve.system.files import open_regular

__all__ = ["SharedFile"]


class SharedFile:
    """An open file of ``size`` bytes. Use ``create`` or ``open``; methods raise OSError."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.size = path, size
        self._descriptor = descriptor

    @classmethod
    def create(
        cls, path: Path, first: bytes | memoryview, size: int, *, replace: bool = True
    ) -> "SharedFile":
        """A file (0600) of ``size`` bytes, which starts with ``first``, in place of an older one.

        It appears under its name complete: readers never see half a header. All its memory is
        claimed at once, so that a lack of it is seen here. Without ``replace`` an older file is a
        FileExistsError.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # left by a dead process that had the same id
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        made = cls(path, os.open(temporary, flags, 0o600), size)
        try:
            os.posix_fallocate(made._descriptor, 0, size)
            made.write(first)
            if replace:
                temporary.rename(path)
            else:
                os.link(temporary, path)
        except BaseException:
            made.close()
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return made

    @classmethod
    def open(cls, path: Path, size: int = 0, *, writable: bool = False) -> "SharedFile":
        """The file at ``path``, which has ``size`` bytes or more; links and pipes are refused."""
        descriptor = open_regular(path, os.O_RDWR if writable else os.O_RDONLY)
        if os.fstat(descriptor).st_size < size:
            os.close(descriptor)
            raise OSError(f"{path} is shorter than {size} bytes")
        return cls(path, descriptor, size)

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called."""
        return self._descriptor >= 0

    def read(self, size: int, offset: int = 0) -> bytes:
        """At most ``size`` bytes from ``offset``; fewer where the file was truncated."""
        return os.pread(self._descriptor, size, offset)

    def write(self, content: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write ``content`` at ``offset``; an OSError where not all of it fits."""
        if os.pwrite(self._descriptor, content, offset) != len(content):
            raise OSError(f"no room for {len(content)} bytes in {self.path}")

    def cut(self, size: int) -> None:
        """Drop what lies behind ``size`` bytes."""
        os.ftruncate(self._descriptor, size)

    def is_named(self) -> bool:
        """Whether its name leads to it, not to another file. A FileNotFoundError: to none."""
        named = os.stat(self.path, follow_symlinks=False)
        # The number of an inode is not used again while the file is open here.
        held = os.fstat(self._descriptor)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def is_whole(self) -> bool:
        """Whether there is a file under its name, and nothing of this one was cut off."""
        return os.path.lexists(self.path) and os.fstat(self._descriptor).st_size >= self.size

    def put_back(self) -> None:
        """Put a copy under the name where that is free, and go on in it; be whole in any case.

        A file that was truncated is filled up with zeros. Nobody may write meanwhile.
        """
        os.posix_fallocate(self._descriptor, 0, self.size)
        if not os.path.lexists(self.path):
            content = self.read(self.size)
            self.go_on_in(SharedFile.create(self.path, content, self.size, replace=False))

    def go_on_in(self, other: "SharedFile") -> None:
        """Be ``other``, which is closed, instead. Another thread may be reading meanwhile."""
        os.dup2(other._descriptor, self._descriptor, inheritable=False)
        other.close()

    def close(self) -> None:
        """Close the file, which stays; may be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
