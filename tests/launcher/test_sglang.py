"""How SGLang's server is started on CPUs."""

import pytest

from tests.support.engine_flags import run_reader
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher import engine, sglang
from ultraep_serve.launcher.engine import EngineCommand, read_flags

TWO_RANKS = ["--device", "cpu", "--tp-size", "2", "--ep-size", "2"]


@pytest.fixture(autouse=True)
def _engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # vLLM's platform for CPUs sets it
    monkeypatch.setattr(sglang, "find_spec", lambda name: name)
    monkeypatch.setattr(engine, "run_reader", run_reader)
    monkeypatch.setattr(engine, "find_library", "lib{}.so".format)
    monkeypatch.setattr(sglang, "cores_of_ranks", lambda num_ranks: [[0, 1], [2, 3]])


def engine_command(flags: list[str]) -> EngineCommand:
    words = ["--model-path", "m", *flags]
    return sglang.engine_command(read_flags("sglang", words), words, BalanceConfig())


def test_ranks_on_cpus_get_cores_and_a_cache_unless_the_user_said() -> None:
    command = engine_command(TWO_RANKS)
    environment = command.environment
    assert environment["LD_PRELOAD"] == "libtcmalloc_minimal.so"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert command.arguments[-2:] == ["--max-total-tokens", "32768"]
    assert len(command.said) == 2
    flags = [*TWO_RANKS, "--max-total-tokens", "7", "--attention-backend", "triton"]
    command = engine_command(flags)
    assert command.arguments[5:] == flags
    assert len(command.said) == 1


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "find_spec", lambda name: name if name == "sgl_kernel" else None)
    with pytest.raises(ConfigError, match="imports torchvision, which have no CPU build"):
        engine_command(TWO_RANKS)
