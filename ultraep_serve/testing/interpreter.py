"""Triton's interpreter, which is chosen by the environment before Triton is imported."""

import subprocess
import sys
from collections.abc import Sequence

import triton

__all__ = ["interpreted", "restart_interpreted"]


def interpreted(arguments: Sequence[str]) -> list[str]:
    """The command for ``python ARGUMENTS`` with kernels run by the interpreter."""
    return ["env", "TRITON_INTERPRET=1", sys.executable, *arguments]


def restart_interpreted() -> None:
    """Run this program again under the interpreter and exit as it does, unless it runs so."""
    if not triton.knobs.runtime.interpret:
        sys.exit(subprocess.run(interpreted(sys.argv), check=False).returncode)
