"""Fixtures of the doctor's tests: a made-up /dev/shm, and engines as the launcher sees them."""

from pathlib import Path

import pytest

from tests.support.engine_flags import run_reader
from ultraep_serve.cli import serve
from ultraep_serve.doctor import memory
from ultraep_serve.telemetry import run_directory as run_directories


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm, so that servers of this machine are left alone."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(run_directories, "SHARED_MEMORY", path)
    return path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for CPU and SGLang, as far as the launcher looks before it starts one."""
    for module in (serve, serve.sglang):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(serve.engine, "run_reader", run_reader)
    monkeypatch.setattr(serve.vllm, "_is_cpu_build", lambda: True)
    monkeypatch.setattr(serve.vllm, "has_amx", lambda: False)
    monkeypatch.setattr(memory, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(memory, "total_memory", lambda: 4 << 30)
