"""Run checks of the device kernels under Triton's interpreter, in a process of their own."""

import subprocess
from pathlib import Path

from tests.support.interpreter import interpreted

FOLDER = Path(__file__).parent


def run_interpreted(*arguments: str, timeout_seconds: float = 600) -> str:
    """Output of ``python ARGUMENTS`` with TRITON_INTERPRET=1 in its environment alone.

    Raises AssertionError with the output where it fails.
    """
    done = subprocess.run(
        ["env", "OMP_NUM_THREADS=1", *interpreted(arguments)],
        cwd=FOLDER.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
