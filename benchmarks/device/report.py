"""Results of checks: one row each, printed and appended to a file as soon as it is known."""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.device.status import DeviceStatus

__all__ = ["Report", "require", "require_equal", "require_ok"]


class Report:
    """The rows of one part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all_passed = True

    def run(self, what: str, check: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Make one check: its figures, or whatever it raises, are the row."""
        try:
            row = {"what": what, "passed": True, **check(*arguments)}
        except Exception as error:
            traceback.print_exc()
            self.all_passed = False
            row = {"what": what, "passed": False, "error": f"{type(error).__name__}: {error}"}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        figures = [
            f"{name} {_text(value)}"
            for name, value in row.items()
            if name not in ("what", "passed", "rank_microseconds")
        ]
        print("ok    " if row["passed"] else "FAILED", what, " ", "  ".join(figures), flush=True)


def require(truth: object, otherwise: str) -> None:
    """Raise AssertionError saying what is wrong ``otherwise``."""
    if not truth:
        raise AssertionError(otherwise)


def require_equal(found: torch.Tensor, expected: NDArray[Any] | torch.Tensor, what: str) -> None:
    """Raise AssertionError where ``what`` is not as expected, bit for bit."""
    other = expected.cpu().numpy() if isinstance(expected, torch.Tensor) else expected
    require(np.array_equal(found.cpu().numpy(), other), f"{what} differs from its twin")


def require_ok(status: torch.Tensor) -> None:
    """Raise AssertionError where kernels left a word in ``status``."""
    word = DeviceStatus(int(status.item()))
    require(word is DeviceStatus.OK, f"kernels report {word!r}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{name} {_text(part)}" for name, part in value.items())
        return f"({', '.join(pairs)})"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
