"""Files: whole or not written at all; shared; secret; and those of others, opened with checks."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ultraep_serve.errors import ConfigError, OutputError, UltraEPError

_MOST_TEXT = 64 << 20  # bytes; a text of prompts is the largest
_MOST_TOKEN = 4096  # bytes


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error}); choose another file") from error


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A path beside ``path``, whatever that is; it takes its place, or is removed on any error."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with errors_naming(path):
            yield part
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` for other processes of this user; in place of ``path``, also where that is
    a link that somebody left there. Raises OutputError, also where there is no such directory.
    """
    with replacement(path) as part:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
            file.write(content)


def parse_object(
    text: str, name: str, error: type[UltraEPError] = ConfigError, *, is_ours: bool = False
) -> dict[str, Any]:
    """``text`` as a JSON object; in ours no name is given twice. Raises ``error`` with ``name``."""
    try:
        value = json.loads(text, object_pairs_hook=named_once if is_ours else None)
    except (ValueError, RecursionError) as reason:
        raise error(f"{name} is not JSON: {reason}") from reason
    if not isinstance(value, dict):
        raise error(f"{name} must be a JSON object")
    return value


def named_once(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """``pairs`` as a mapping. Raises ValueError where a name is given twice."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file of others; ``what`` it is. Raises ConfigError."""
    return parse_object(read_text(path, what), str(path))


def read_text(path: Path, what: str) -> str:
    """The text in a file that the user named; ``what`` it is, for errors. Raises ConfigError."""
    try:
        with os.fdopen(open_regular(path, links=True), "rb") as file:
            content = file.read(_MOST_TEXT + 1)
        if len(content) > _MOST_TEXT:
            raise OSError(f"more than {_MOST_TEXT >> 20} MiB")
        return content.decode("utf-8-sig")  # an editor may begin it with a byte order mark
    except (OSError, ValueError) as error:  # a name with a zero byte; no UTF-8
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error


def open_regular(
    path: Path | str, flags: int = os.O_RDONLY, *, directory: int | None = None, links: bool = False
) -> int:
    """Descriptor of ``path``, in ``directory`` (a descriptor) where that is given.

    A file that ``flags`` create is this user's alone (0600).
    Raises OSError, also for pipes, devices and directories, and without ``links`` for links.
    """
    # O_NONBLOCK: opening a pipe must not wait for its other end.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o600, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def open_own_directory(path: Path) -> int:
    """Descriptor of a directory of this user. Raises OSError, also for links."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    return descriptor


def checked_token(text: str, source: str) -> str:
    """A bearer token, ``text`` without white space around it.

    Raises ConfigError, which names ``source`` and shows no part of the text, where the rest could
    not be sent as a header: anything but visible ASCII characters.
    """
    token = text.strip()
    if len(token) > _MOST_TOKEN or not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"{source} must be one line of at most {_MOST_TOKEN} visible ASCII characters, "
            "without spaces"
        )
    return token


def read_token(path: Path) -> str:
    """The token in ``path``. Raises ConfigError, also where others could know it.

    File and directory must be this user's, and closed to everybody else. Without the second a file
    of this user's that holds another secret could be linked there.
    """
    try:
        directory = open_own_directory(path.parent)
        try:
            _require_private(directory, path.parent)
            with os.fdopen(open_regular(path.name, directory=directory), "rb") as file:
                _require_private(file.fileno(), path)
                text = file.read(_MOST_TOKEN + 1).decode("ascii")
        finally:
            os.close(directory)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    token = checked_token(text, str(path))
    if not token:
        raise ConfigError(f"{path} is empty; remove it, a new one will be made")
    return token


def _require_private(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{path} can be read by others, or is not this user's")


class SharedFile:
    """An open file of ``size`` bytes, which one process writes and others read.

    It is read and written by calls, never mapped: a mapped file that somebody truncates kills the
    process that touches it, where a call only fails. A file that was deleted is still there for
    whoever has it open. Use ``create`` or ``open``; methods raise OSError.
    """

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
        return self._descriptor >= 0

    def read(self, size: int, offset: int = 0) -> bytes:
        """At most ``size`` bytes from ``offset``; fewer where the file was truncated."""
        return os.pread(self._descriptor, size, offset)

    def write(self, content: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write ``content`` at ``offset``; an OSError where not all of it fits."""
        if os.pwrite(self._descriptor, content, offset) != len(content):
            raise OSError(f"no room for {len(content)} bytes in {self.path}")

    def damage(self) -> str:
        """What somebody has done to it: ``deleted``, ``replaced``, ``truncated``; else empty."""
        held = os.fstat(self._descriptor)
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return "deleted"
        # The number of an inode is not used again while the file is open here.
        if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            return "replaced"
        return "truncated" if held.st_size < self.size else ""

    def close(self) -> None:
        """Close the file, which stays; may be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
