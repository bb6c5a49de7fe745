"""One target under libFuzzer, with coverage of this package.

python -m tests.fuzz.run TARGET libFuzzer's arguments
"""

import gc
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["ultraep_serve", "ultraep_lab"], enable_loader_override=False
):
    from tests.fuzz.targets import TARGETS

name, *arguments = sys.argv[1:]
with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
    read = TARGETS[name].make(Path(folder))
    gc.freeze()  # what was imported is never garbage
    atheris.Setup([sys.argv[0], *arguments], read)
    atheris.Fuzz()
