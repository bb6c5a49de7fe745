"""Every kernel over its edge cases: ``tests/cuda/check_*.py``, which are checked and not timed."""

import importlib
import inspect
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from report import Report

from tests.support.bench import Bench

IN_HOST_MEMORY = ("balancer", "samples", "setup")


def run(bench: Bench, report: Report, *names: str) -> None:
    """Every case of every function ``test_...`` of ``names`` is a row.

    On a GPU those are left out that play the device in host memory.
    """
    names = tuple(name for name in names if bench.interpreted or name not in IN_HOST_MEMORY)
    with warnings.catch_warnings():
        if bench.interpreted:  # a GPU machine has versions of its own
            warnings.simplefilter("error")
        for name in names:
            found = importlib.import_module(f"tests.cuda.check_{name}")
            for check in vars(found).values():
                if getattr(check, "__name__", "").startswith("test_"):
                    _run_cases(bench, report, f"check_{name}.py::{check.__name__}", check)


def _run_cases(bench: Bench, report: Report, what: str, check: Callable[..., None]) -> None:
    fixed = {"bench": bench} if "bench" in inspect.signature(check).parameters else {}
    for case in getattr(check, "cases", [{}]):
        row: dict[str, Any] = {"what": what + (f"[{_label(case)}]" if case else "")}
        try:
            check(**fixed, **case)
            report.add({**row, "passed": True})
        except Exception:
            report.add({**row, "passed": False, "error": traceback.format_exc()})


def _label(case: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items())
