"""Write whole files or none; read arrays out of ``.npz`` files that nobody vouches for."""

import os
import secrets
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.traces.errors import TraceError

__all__ = ["check_writable", "read_npz", "whole_file"]

DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError,
    RuntimeError, SyntaxError, MemoryError,
)  # fmt: skip  # all that zipfile and NumPy raise on damaged files


def check_writable(path: Path) -> None:
    """Find out before the work. Raises TraceError where ``path`` could not be written."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise TraceError(f"{path} cannot be written; choose a file in an existing directory")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it becomes ``path`` at the end, or goes on any error.

    Raises TraceError when the file system refuses.
    """
    check_writable(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise TraceError(f"{path} cannot be written ({error}); choose another file") from error
    finally:
        part.unlink(missing_ok=True)


def read_npz(path: Path, wanted: tuple[str, ...], max_bytes: int) -> dict[str, NDArray[Any]]:
    """Those of the ``wanted`` arrays that the file has, read-only; never unpickles.

    Sizes are taken from the headers and refused before anything is allocated.

    Raises:
        TraceError: no such file, damaged or truncated, arrays of objects, or together more than
            ``max_bytes``.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            arrays: dict[str, NDArray[Any]] = {}
            left = max_bytes
            for name in wanted:
                if (info := members.get(f"{name}.npy")) is not None:
                    arrays[name] = _read_member(archive, info, left)
                    left -= arrays[name].nbytes
            return arrays
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist") from None
    except DAMAGED as error:
        raise TraceError(f"{path} is no readable .npz file, or is cut short ({error})") from error


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> NDArray[Any]:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"{info.filename} is compressed in a way that NumPy does not write")
    with archive.open(info) as stream:
        shape, is_fortran, dtype = _read_header(stream)
        if dtype.hasobject:
            raise TraceError(f"{info.filename} holds Python objects; write plain numbers")
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        if num_bytes > max_bytes:
            raise TraceError(
                f"{info.filename} would take {num_bytes} bytes of the {max_bytes} allowed; "
                "cut the trace into smaller files"
            )
        if info.file_size != stream.tell() + num_bytes:
            raise TraceError(f"{info.filename} is {dtype} {shape} but has other than its size")
        data = stream.read(num_bytes)
        stream.read(1)  # at the end of a member its checksum is compared
    if len(data) != num_bytes:
        raise TraceError(f"{info.filename} is cut short")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    npy: Any = np.lib.format  # its functions have no types
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise TraceError(f"array format {version} is not known; write version 1.0 or 2.0")
    shape, is_fortran, dtype = readers[version](stream)
    if any(size < 0 for size in shape):
        raise TraceError(f"an array has the impossible shape {shape}")
    return shape, is_fortran, dtype
