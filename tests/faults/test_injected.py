"""Some of the faults that ``make check-faults`` injects, and the result of all of them."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.check import is_expected
from tests.faults.injector import Fault, inject
from tests.faults.table import QUICK, faults

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "faults.json"


@pytest.fixture
def folder() -> Iterator[Path]:
    """In shared memory, as runs are."""
    with tempfile.TemporaryDirectory(prefix="uep-faults-", dir="/dev/shm") as made:
        yield Path(made)


@pytest.mark.parametrize("fault", QUICK, ids=", ".join)
def test_what_is_seen_of_a_fault(fault: Fault, folder: Path) -> None:
    assert is_expected(fault, inject(fault, folder))


def test_every_fault_was_injected_and_seen_as_expected() -> None:
    rows = json.loads(RESULT.read_text())["faults"]
    found = {Fault(row["what"], row["how"], row["stage"]): row["seen"] for row in rows}
    assert set(found) == set(faults())
    assert {fault: word for fault, word in found.items() if not is_expected(fault, word)} == {}
