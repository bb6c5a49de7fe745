"""Run checks of the device kernels under Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run_interpreted(*arguments: str, timeout_seconds: float = 600) -> str:
    """Output of ``python ARGUMENTS`` with TRITON_INTERPRET=1 in its environment alone.

    Raises AssertionError with the output where it fails.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
