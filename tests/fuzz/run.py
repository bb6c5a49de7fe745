"""One target under libFuzzer, with coverage of this package.

python -m tests.fuzz.run TARGET libFuzzer's arguments

An input that takes 20 s of computing is a finding. libFuzzer's own limit is of the wall clock, by
which an input is late where the process was stopped or had no core.
"""

import gc
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import atheris

_LOOK_SECONDS = 10.0  # of computing


def main() -> None:
    """Until libFuzzer ends the process."""
    with atheris.instrument_imports(
        include=["ultraep_serve", "ultraep_lab"], enable_loader_override=False
    ):
        from tests.fuzz.targets import TARGETS
    name, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        read = TARGETS[name].make(Path(folder))
        gc.freeze()  # what was imported is never garbage
        # What libFuzzer has a shell run when it merges.
        command = f"{sys.executable} -m tests.fuzz.run {name}"
        atheris.Setup([command, *arguments], _in_time(read))
        atheris.Fuzz()


def _in_time(read: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """``read``, which may not be with the same input at three looks in a row."""
    begun, seen = 0, [-1, -2]

    def look(_number: int, _frame: FrameType | None) -> None:
        if seen == [begun, begun]:
            raise TimeoutError(f"an input takes {2 * _LOOK_SECONDS} s")
        seen[:] = seen[1], begun

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, _LOOK_SECONDS, _LOOK_SECONDS)

    def counted(data: bytes) -> None:
        nonlocal begun
        begun += 1
        read(data)

    return counted


main()
