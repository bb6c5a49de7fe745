"""Fixtures shared by several test files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ultraep_serve.testing import make_model, tiny_glm4, tiny_qwen3
from ultraep_serve.testing.ranks import fresh_run_path


@pytest.fixture
def run_path() -> Iterator[Path]:
    """A run directory in shared memory, gone after the test."""
    with fresh_run_path() as path:
        yield path
    assert not path.exists()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose router favours some experts."""
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", tiny_qwen3()).path


@pytest.fixture(scope="session")
def glm4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with grouped routing and a shared expert."""
    return make_model(tmp_path_factory.mktemp("models") / "glm4", tiny_glm4()).path
