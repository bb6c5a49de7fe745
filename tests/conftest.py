"""Fixtures shared by tests that start several processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ultraep_serve.testing.ranks import fresh_run_path


@pytest.fixture
def run_path() -> Iterator[Path]:
    """A run directory in shared memory, gone after the test."""
    with fresh_run_path() as path:
        yield path
    assert not path.exists()
