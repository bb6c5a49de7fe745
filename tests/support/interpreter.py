"""Triton's interpreter, which is chosen by the environment before Triton is imported."""

import sys
from collections.abc import Sequence

__all__ = ["interpreted"]


def interpreted(arguments: Sequence[str]) -> list[str]:
    """The command for ``python ARGUMENTS`` with kernels run by the interpreter."""
    return ["env", "TRITON_INTERPRET=1", sys.executable, *arguments]
