"""How vLLM's server is started, and what is refused before that."""

import json
import os
from pathlib import Path

import pytest

from tests.support.engine_flags import run_reader
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher import engine, vllm
from ultraep_serve.launcher.engine import EngineCommand, read_flags
from ultraep_serve.launcher.vllm import count_ranks
from ultraep_serve.system import versions
from ultraep_serve.types import Policy

QUOTA, OFF = BalanceConfig(), BalanceConfig(policy=Policy.OFF)
TWO_RANKS = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]


@pytest.fixture(autouse=True)
def _engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_reader", run_reader)
    monkeypatch.setattr(versions, "unfit_packages", lambda _: [])


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_is_cpu_build", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})


def checkpoint(path: Path, **config: object) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def engine_command(model: str, flags: list[str], config: BalanceConfig) -> EngineCommand:
    words = ["--model", model, *flags]
    return vllm.engine_command(read_flags("vllm", words), words, config)


DATA_PARALLEL = ["-dp", "8", "--enable-expert-parallel"]


@pytest.mark.parametrize(
    ("flags", "ranks_here"),
    [
        ([*DATA_PARALLEL, "--nnodes", "4"], 2),
        ([*DATA_PARALLEL, "--data-parallel-size-local", "2"], 2),
        ([*DATA_PARALLEL, "-tp", "2", "-dpl", "2"], 4),
        ([*DATA_PARALLEL, "-dpl", "2", "--data-parallel-start-rank", "2"], 2),
        ([*DATA_PARALLEL, "--data-parallel-rank", "3"], 1),
    ],
)
def test_ranks_of_this_host_are_counted(flags: list[str], ranks_here: int) -> None:
    assert count_ranks(read_flags("vllm", flags)).here == ranks_here


def test_a_host_without_a_server_runs_ranks_alone() -> None:
    flags = [*DATA_PARALLEL, "-dpl", "2", "-dpr", "2", "--headless"]
    command = engine_command("m", flags, QUOTA)
    assert command.address is None
    program = ["-m", "ultraep_serve.engines.vllm.headless", "--model", "m", *flags]
    assert command.arguments[1 : 1 + len(program)] == program


def test_the_address_is_known() -> None:
    flags = ["--host", "10.0.0.7", "--port=9000"]
    assert engine_command("m", flags, OFF).address == ("10.0.0.7", 9000)


@pytest.mark.usefixtures("cpu_build")
def test_ranks_share_the_cores_where_they_outnumber_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {2: [[0, 1], [2, 3]], 8: [[cpu] for cpu in (0, 1, 2, 3) * 2]}
    monkeypatch.setattr(vllm, "cores_of_ranks", lambda num_ranks: lists.get(num_ranks, []))
    for flags, cores in ((["-tp", "2"], "0,1|2,3"), (["-tp", "2", "-dp", "4"], "0|1|2|3|0|1|2|3")):
        command = engine_command("m", flags, OFF)
        assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == cores
        assert f"cores {cores}" in command.said[0]
    command = engine_command("m", ["-tp", "3"], OFF)  # each has a node
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.environment
    assert "--kv-cache-memory-bytes" not in command.arguments
    assert not command.said


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize("there", [(), ("tcmalloc",), ("tcmalloc_minimal", "tcmalloc")])
def test_memory_comes_from_tcmalloc_where_it_is_installed(
    there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = {name: f"lib{name}.so.4" for name in there}.get
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # vLLM's platform for CPUs sets it
    monkeypatch.setattr("ultraep_serve.launcher.engine.find_library", find)
    environment = engine_command("m", ["-tp", "2"], OFF).environment
    assert environment.get("LD_PRELOAD") == (f"lib{there[0]}.so.4" if there else None)


@pytest.mark.usefixtures("cpu_build")
def test_all_caches_take_half_of_the_free_memory_unless_the_user_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "cores_of_ranks", lambda num_ranks: [[0], [1]])
    monkeypatch.setattr(vllm, "available_memory", lambda: 10 << 30)

    def cache(*flags: str) -> str | None:
        words = engine_command("m", [*TWO_RANKS, *flags], QUOTA).arguments
        name = "--kv-cache-memory-bytes"
        return words[words.index(name) + 1] if name in words else None

    assert cache() == str((10 << 30) // 4)
    assert cache("--kv-cache-memory-bytes", "2G") == "2G"
    assert cache("--gpu-memory-utilization", "0.3") is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert cache() is None


def test_a_local_checkpoint_needs_no_network(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, num_experts=8)
    assert engine_command(model, TWO_RANKS, QUOTA).environment["HF_HUB_OFFLINE"] == "1"


def test_a_gpu_server_that_cannot_start_is_refused_and_told_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "_is_cpu_build", lambda: False)
    unfit = versions.Unfit("nccl", "NCCL is old", "pip install nccl", False)
    monkeypatch.setattr(versions, "unfit_packages", lambda _: [unfit])
    assert engine_command("org/model", TWO_RANKS, QUOTA).said == ["NCCL is old; pip install nccl"]
    unfit = unfit._replace(stops=True)
    monkeypatch.setattr(versions, "unfit_packages", lambda _: [unfit])
    with pytest.raises(ConfigError, match="NCCL is old; pip install nccl"):
        engine_command("org/model", TWO_RANKS, QUOTA)
    engine_command("org/model", TWO_RANKS, OFF)


@pytest.mark.parametrize(
    "flags",
    [
        ["-tp", "8", "-ep", "--moe-backend", "triton", "--max-cudagraph-capture-size", "256"],
        ["-dp", "8", "-ep", "--all2all-backend", "deepep_high_throughput", "--enforce-eager"],
    ],
)
def test_a_server_on_gpus_gets_its_flags_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setattr(vllm, "_is_cpu_build", lambda: False)
    command = engine_command("org/model", flags, QUOTA)
    program = ["-m", "vllm.entrypoints.openai.api_server", "--model", "org/model", *flags]
    assert command.arguments[1:-1] == [*program, "--additional-config"]
    assert command.environment.items() <= os.environ.items()  # no settings of CPUs
