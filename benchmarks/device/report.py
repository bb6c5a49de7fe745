"""Results of checks: one row each, printed and appended to a file as soon as it is known."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

EMULATED = "EMULATED_GPU_OPERATORS" in os.environ


class Report:
    """The rows of one part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all_passed = True

    def run(self, what: str, check: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Make one check: its figures, or whatever it raises, are the row.

        On an emulated GPU a check ends, and passes, at an operator that is refused there.
        """
        try:
            row = {"what": what, "passed": True, **check(*arguments)}
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            row = {"what": what, "passed": False, "error": said}
            if EMULATED and "the emulated GPU has no values" in said:
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


def _text(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{name} {_text(part)}" for name, part in value.items())
        return f"({', '.join(pairs)})"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
