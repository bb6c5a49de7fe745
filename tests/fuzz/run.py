"""One target under libFuzzer, with coverage of this package.

python -m tests.fuzz.run TARGET libFuzzer's arguments
"""

import sys
import tempfile
from pathlib import Path

import atheris


def main() -> None:
    """Until libFuzzer ends the process."""
    with atheris.instrument_imports(include=["ultraep_serve"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    name, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        read = TARGETS[name].make(Path(folder))
        atheris.Setup([sys.argv[0], *arguments], read)
        atheris.Fuzz()


main()
