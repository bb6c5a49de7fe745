"""The machine's C code, compiled for this processor when it is first needed."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["OPERATIONS", "library", "private_folder"]

_FOLDER = Path(__file__).parent
_OPTIONS = ("-O2", "-march=native", "-ftree-vectorize", "-fno-strict-aliasing", "-Wall", "-Werror")
_FIRST_SPECIAL = 1000  # BRANCH in machine.c
_SIGNATURES = {
    "new_machine": "pqqqqqqq",
    "begin_work": "qpq",
    "free_machine": "vp",
    "new_cells": "pq",
    "free_cells": "vp",
    "add_memory": "qpqqpqqq",
    "add_launch": "qppqqqpqqpqq",
    "host_access": "qpqqqqq",
    "end_host": "vp",
    "run": "qpq",
    "error_of": "sp",
    "has_stopped": "qpq",
    "steps_of": "qp",
    "longest_of": "qpq",
    "host_turn": "qp",
    "num_reports": "qp",
    "reports_of": "pp",
    "set_clock": "vpq",
    "num_operations": "q",
    "operation_name": "sq",
    "special_opcodes": "s",
    "where": "qppq",
}
_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64, "s": ctypes.c_char_p, "v": None}


@cache
def library() -> ctypes.CDLL:
    """The compiled machine; RuntimeError with what the compiler says where it cannot be made."""
    text = b"".join(path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]")))
    digest = hashlib.sha256(text + repr(_OPTIONS).encode()).hexdigest()[:16]
    path = private_folder() / f"machine-{digest}.so"
    if not path.exists():
        half = path.with_suffix(f".{os.getpid()}")
        source = str(_FOLDER / "machine.c")
        command = ["gcc", *_OPTIONS, "-shared", "-fPIC", "-o", str(half), source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
        half.rename(path)
    loaded = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = _TYPES[result]
        function.argtypes = [_TYPES[each] for each in arguments]
    return loaded


def private_folder() -> Path:
    """Where what was compiled is kept from run to run."""
    folder = Path(tempfile.gettempdir()) / f"ultraep-ptx-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _operations() -> dict[str, int]:
    """Every operation that the machine knows, by name."""
    names = [library().operation_name(n).decode() for n in range(library().num_operations())]
    special = library().special_opcodes().decode().split()
    return {name: number for number, name in enumerate(names)} | {
        name: _FIRST_SPECIAL + number for number, name in enumerate(special)
    }


OPERATIONS = _operations()
