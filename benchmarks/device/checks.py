"""Every kernel over its edge cases: ``tests/cuda/check_*.py``, which are checked and not timed."""

import os
import sys
from pathlib import Path

from report import Report

from tests.support.bench import Bench

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "cuda"


def run(bench: Bench, report: Report, *names: str) -> None:
    """Every check of ``names`` is a row; those that need the interpreter are left out on a GPU."""
    import pytest

    assert names, "without files pytest would run whatever it finds"

    class Rows:
        """Takes pytest's results down."""

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                add(report)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed or (report.when == "call" and report.passed):
                add(report)

    def add(outcome: "pytest.CollectReport | pytest.TestReport") -> None:
        row = {"what": outcome.nodeid, "passed": outcome.passed}
        report.add(row if outcome.passed else {**row, "error": outcome.longreprtext})

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", f"--confcutdir={FOLDER}"]
    options += ["-W", "error"] if bench.interpreted else []  # a GPU machine has versions of its own
    checks = [str(FOLDER / f"check_{name}.py") for name in names]
    options += ["-p", "no:cacheprovider", "-p", "no:terminal", "--continue-on-collection-errors"]
    code = pytest.main([*options, *checks], plugins=[Rows()])
    if code and report.all_passed:
        sys.exit(f"pytest ended with {code!r}")
