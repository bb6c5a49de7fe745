"""Results: whole or not written at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ultraep_serve.system.files import errors_naming, replacement


def prepare_output(path: Path) -> None:
    """Make the directory of ``path``; call it before the work, so that no result is lost.

    Raises OutputError where ``path`` could not be written.
    """
    with errors_naming(path):
        if path.is_dir():
            raise IsADirectoryError("it is a directory")
        if path.exists() and not _is_replaced(path):
            if not os.access(path, os.W_OK):
                raise PermissionError("this user may not write to it")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes ``path`` at the end, or is removed on any error.

    Readers see the old file or the whole new one. A ``path`` that is a link, a device or a pipe
    stays one: what was written is copied to it. Raises OutputError when the file system refuses.
    """
    prepare_output(path)
    if _is_replaced(path):
        with replacement(path) as part:
            yield part
        return
    with errors_naming(path), tempfile.TemporaryDirectory() as folder:
        yield (part := Path(folder, path.name))
        # Opened by name: the kernel then refuses links that others left in a shared directory.
        with part.open("rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


def _is_replaced(path: Path) -> bool:
    """Whether ``path`` is a regular file, or nothing yet."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def write_json(path: Path, document: Any) -> None:
    """Write ``document`` as indented JSON through ``whole_file``. Raises OutputError."""
    with whole_file(path) as part:
        part.write_bytes(f"{json.dumps(document, indent=2, allow_nan=False)}\n".encode())
