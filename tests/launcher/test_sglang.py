"""How SGLang's server is started on CPUs; SGLang itself is not needed."""

from collections.abc import Callable

import pytest

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher import sglang

TWO_RANKS = ["--device", "cpu", "--tp-size", "2", "--ep-size", "2"]


@pytest.fixture(autouse=True)
def _engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # vLLM's platform for CPUs sets it
    monkeypatch.setattr(sglang, "find_spec", lambda name: name)
    monkeypatch.setattr("ultraep_serve.launcher.engine.find_library", "lib{}.so".format)
    monkeypatch.setattr(sglang, "cores_of_ranks", lambda num_ranks: [[0, 1], [2, 3]])


def test_ranks_on_cpus_get_cores_and_a_cache_unless_the_user_said() -> None:
    command = sglang.engine_command("m", TWO_RANKS, BalanceConfig())
    environment = command.environment
    assert environment["LD_PRELOAD"] == "libtcmalloc_minimal.so"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert command.arguments[-2:] == ["--max-total-tokens", "32768"]
    assert len(command.said) == 2
    flags = [*TWO_RANKS, "--max-total-tokens", "7", "--attention-backend", "x"]
    command = sglang.engine_command("m", flags, BalanceConfig())
    assert command.arguments[5:] == flags
    assert len(command.said) == 1


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (lambda name: name == "sglang", "SGLang is not installed here"),
        (lambda name: name == "torchvision", "imports torchvision, which have no CPU build"),
    ],
)
def test_what_is_not_installed_is_named(
    missing: Callable[[str], bool], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "find_spec", lambda name: None if missing(name) else name)
    with pytest.raises(ConfigError, match=message):
        sglang.engine_command("m", TWO_RANKS, BalanceConfig())


def test_a_backend_that_sends_tokens_takes_as_many_ranks_as_are_tensor_parallel() -> None:
    sglang._check_parallelism(sglang.parse_engine_flags(["--tp", "4", "--moe-a2a-backend", "x"]))
