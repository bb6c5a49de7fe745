"""Results of checks: one row each, printed and appended to a file as soon as it is known."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["EMULATED", "HAS_VALUES", "Report"]

ROOT = Path(__file__).resolve().parents[2]
EMULATED = "ULTRAEP_EMULATED_GPU" in os.environ
HAS_VALUES = not EMULATED or "EMULATED_GPU_OPERATORS" in os.environ  # engines' kernels compute


class Report:
    """The rows of one part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all_passed = True

    def run(self, what: str, check: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Make one check: its figures, or whatever it raises, are the row.

        On an emulated GPU a check ends, and passes, at an operator that is refused there, or, where
        engines' kernels do not compute, at an ``assert`` of values.
        """
        try:
            row = {"what": what, "passed": True, **check(*arguments)}
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            row = {"what": what, "passed": False, "error": said}
            if _is_refusal(error) if HAS_VALUES else _is_comparison(error):
                row = {"what": what, "passed": True, "ends_at": said.splitlines()[0]}
        self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """A check that was made: ``what``, whether it ``passed``, its figures or its ``error``."""
        self.all_passed &= row["passed"]
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        hidden = ("what", "passed", "rank_microseconds")
        figures = [f"{name} {_text(row[name])}" for name in row if name not in hidden]
        state = "ok    " if row["passed"] else "FAILED"
        print(state, row["what"], " ", "  ".join(figures), flush=True)


def _is_refusal(error: Exception) -> bool:
    """Whether the emulated GPU has no values for what was called."""
    return "the emulated GPU has no values" in str(error)


def _is_comparison(error: Exception) -> bool:
    """Whether it is an ``assert`` of this project's, and none of an engine's."""
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    own = [ROOT / folder for folder in ("benchmarks", "tests")]
    return isinstance(error, AssertionError) and any(place.is_relative_to(each) for each in own)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{name} {_text(part)}" for name, part in value.items())
        return f"({', '.join(pairs)})"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
