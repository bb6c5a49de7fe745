"""Fixtures shared by several test files."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ultraep_kernels.host.plan import plan

from tests.support.ranks import fresh_run_path
from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.models import make_model

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

    from tests.support.rings import SyntheticRun
    from tests.support.sidecar_runs import SkewedRun


def pytest_sessionstart(session: pytest.Session) -> None:
    """Ctrl-C reaches tests, also in a shell's background; workers find a planner compiled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if session.config.getoption("numprocesses", None):
        plan(np.ones((2, 2), np.int64), 1, 0, 2, np.ones(2, np.int64))


@pytest.fixture
def run_path() -> Iterator[Path]:
    """A run directory in shared memory, gone after the test."""
    with fresh_run_path() as path:
        yield path
    assert not path.exists()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose router favours some experts."""
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", tiny_qwen3())


@pytest.fixture(scope="session")
def qwen3_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same whose router favours one of four ranks, so that halves are uneven in themselves."""
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", tiny_qwen3(num_ranks=4))


@pytest.fixture
def skewed_run(tmp_path: Path) -> "Iterator[SkewedRun]":
    """Two ranks in ``tmp_path``, all load of every batch on the first."""
    from tests.support.sidecar_runs import SkewedRun

    made = SkewedRun(tmp_path)
    yield made
    made.close()


@pytest.fixture
def planned_run(tmp_path: Path) -> "Iterator[SyntheticRun]":
    """Four ranks in ``tmp_path`` whose plans are the planner's."""
    from tests.support.rings import planned_run

    made = planned_run(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path) -> "TestClient":
    """A client of a sidecar over ``tmp_path``, which ``sidecar_runs.TOKEN`` opens."""
    from fastapi.testclient import TestClient

    from tests.support.sidecar_runs import TOKEN
    from ultraep_serve.sidecar.app import create_app

    return TestClient(create_app(tmp_path, TOKEN))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """vLLM's adapter as on a GPU; patches, also those made through it, are undone."""
    from tests.support.vllm_gpu import pretend_gpu

    pretend_gpu(monkeypatch)
    return monkeypatch.setattr


@pytest.fixture
def balanced(on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The same, balancing switched on."""
    from tests.support.vllm_gpu import NUM_SLOTS, configure

    configure(monkeypatch.setenv, slots=NUM_SLOTS)
    return on_gpu
