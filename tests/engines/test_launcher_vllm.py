"""How vLLM's server is started, and what is refused before that."""

import json
from pathlib import Path

import pytest

from tests.support.model_configs import QWEN3_30B
from ultraep_serve.engines.vllm import launch
from ultraep_serve.engines.vllm.launch import engine_command, parse_engine_flags
from ultraep_serve.errors import ConfigError, UnsupportedError
from ultraep_serve.launcher.binding import Core
from ultraep_serve.system import gpu_packages
from ultraep_serve.types import Policy

TWO_RANKS = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]


@pytest.fixture(autouse=True)
def _engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu_packages, "unfit_packages", lambda _: [])


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})


def checkpoint(path: Path, **config: object) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    "flags",
    [
        TWO_RANKS,
        ["-tp", "2", "-ep"],
        ["-tp=2", "-ep"],
        ["--tensor_parallel_size=2", "--enable_expert_parallel"],
        ["--data-parallel-size=2", "--enable-expert-parallel"],
        ["-dp", "2", "--max-model-len", "4096", "-ep"],
    ],
)
def test_flags_are_read_as_the_engine_reads_them(flags: list[str]) -> None:
    command = engine_command("m", flags, Policy.QUOTA)
    assert command.num_ranks == 2
    assert command.arguments[-len(flags) :] == flags
    assert command.url == "http://127.0.0.1:8000"


DATA_PARALLEL = ["-dp", "8", "--enable-expert-parallel"]


@pytest.mark.parametrize(
    ("flags", "ranks_here"),
    [
        (["-tp", "8", "-ep", "--nnodes", "2"], 4),
        ([*DATA_PARALLEL, "--nnodes", "4"], 2),
        ([*DATA_PARALLEL, "--data-parallel-size-local", "2"], 2),
        ([*DATA_PARALLEL, "-tp", "2", "-dpl", "2"], 4),
        ([*DATA_PARALLEL, "-dpl", "2", "--data-parallel-start-rank", "2"], 2),
        ([*DATA_PARALLEL, "--data-parallel-rank", "3"], 1),
    ],
)
def test_only_ranks_of_this_host_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], ranks_here: int
) -> None:
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: False)
    assert engine_command("m", flags, Policy.QUOTA).num_ranks == ranks_here


def test_a_host_without_a_server_runs_ranks_alone() -> None:
    flags = [*DATA_PARALLEL, "-dpl", "2", "-dpr", "2", "--headless"]
    command = engine_command("m", flags, Policy.QUOTA)
    assert command.url is None
    assert command.arguments[1:] == [
        "-m",
        "ultraep_serve.engines.vllm.launch",
        "--model",
        "m",
        *flags,
    ]


def test_host_and_port_make_the_url() -> None:
    flags = ["--host", "10.0.0.7", "--port=9000"]
    assert engine_command("m", flags, Policy.OFF).url == "http://10.0.0.7:9000"
    assert engine_command("m", ["--host", "::"], Policy.OFF).url == "http://127.0.0.1:8000"
    assert parse_engine_flags([]).port == launch.DEFAULT_PORT


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to balance on one rank"),
        (["--enable-expert-parallel"], "add --tensor-parallel-size 2"),
        (["-tp", "4"], "without --enable-expert-parallel"),
        ([*TWO_RANKS, "--enable-eplb"], "drop it, or serve with --policy off"),
        ([*TWO_RANKS, "-dp", "2"], "use one of them, or serve with --policy off"),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    cpu_build: None, flags: list[str], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        engine_command("m", flags, Policy.QUOTA)
    assert engine_command("m", flags, Policy.OFF).arguments[-len(flags) or None :] is not None


@pytest.mark.parametrize("policy", [Policy.QUOTA, Policy.OFF])
def test_a_server_for_each_rank_is_left_to_the_engines_own_command(policy: Policy) -> None:
    """Its server's module, which is started here, would ignore the flag."""
    flags = ["-dp", "8", "-dpl", "8", "-ep", "--data-parallel-multi-port-external-lb"]
    with pytest.raises(UnsupportedError, match="start `vllm serve` itself"):
        engine_command("m", flags, policy)


def test_flags_in_a_file_are_left_to_the_engine() -> None:
    assert engine_command("m", ["--config", "server.yaml"], Policy.QUOTA).num_ranks == 1


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, architectures=["LlamaForCausalLM"], hidden_size=64)
    with pytest.raises(UnsupportedError, match=r"not a Mixture-of-Experts .*LlamaForCausalLM"):
        engine_command(model, TWO_RANKS, Policy.QUOTA)
    assert engine_command(model, TWO_RANKS, Policy.OFF).num_ranks == 2


@pytest.mark.parametrize(
    "config",
    [{"num_experts": 8}, {"text_config": {"n_routed_experts": 64}}, {"num_local_experts": 8}],
)
def test_models_with_experts_are_served(tmp_path: Path, config: dict[str, object]) -> None:
    assert engine_command(checkpoint(tmp_path, **config), TWO_RANKS, Policy.QUOTA)


def test_without_the_engine_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        engine_command("m", TWO_RANKS, Policy.QUOTA)


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize(
    ("flags", "binding"),
    [
        (["-tp", "2"], "0,1|2,3"),
        (["-tp", "4"], "0|1|2|3"),
        (["-tp", "3"], "0|1|2"),
        (["-tp", "2", "-dp", "4"], "0|1|2|3|0|1|2|3"),
        ([], "0,1,2,3"),
    ],
)
def test_ranks_share_the_cores(flags: list[str], binding: str) -> None:
    environment = engine_command("m", flags, Policy.OFF).environment
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == binding


@pytest.mark.usefixtures("cpu_build")
def test_vllm_binds_ranks_that_have_a_node_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [
        Core(node, (cpu, cpu + 8)) for node in range(2) for cpu in range(node * 4, node * 4 + 4)
    ]
    monkeypatch.setattr("ultraep_serve.launcher.binding.cores_here", lambda: cores)
    command = engine_command("m", TWO_RANKS, Policy.QUOTA)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in command.environment
    assert command.binding is not None
    assert "by itself" in command.binding.lines(None)[0]
    command = engine_command("m", ["-tp", "4", "-ep"], Policy.QUOTA)
    chosen = command.environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert chosen == "0,1|2,3|4,5|6,7"
    assert command.binding is not None
    assert command.binding.lines(chosen)[2] == "rank 2: 2 cores 4-5, NUMA node 1"
    assert "'7'" in command.binding.lines("7")[0]  # the user's own


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize("num_ranks", ["1", "2", "4"])
@pytest.mark.parametrize("there", [(), ("tcmalloc",), ("tcmalloc_minimal", "tcmalloc")])
def test_memory_comes_from_tcmalloc_where_it_is_installed(
    num_ranks: str, there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = {name: f"lib{name}.so.4" for name in there}.get
    monkeypatch.setattr("ultraep_serve.engines.common.launch.find_library", find)
    cores = [Core(node, (4 * node + cpu,)) for node in range(2) for cpu in range(4)]
    monkeypatch.setattr("ultraep_serve.launcher.binding.cores_here", lambda: cores)
    environment = engine_command("m", ["-tp", num_ranks], Policy.OFF).environment
    assert environment.get("LD_PRELOAD") == (f"lib{there[0]}.so.4" if there else None)


@pytest.mark.usefixtures("cpu_build")
def test_the_cache_is_sized_unless_the_user_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path, num_experts=8)
    command = engine_command(model, TWO_RANKS, Policy.QUOTA)
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "KV cache of 1 GiB on each rank, as the model's context is not" in command.said[0]
    assert command.environment["HF_HUB_OFFLINE"] == "1"  # a local checkpoint needs no network
    flags = [*TWO_RANKS, "--kv-cache-memory-bytes", "2G"]
    command = engine_command("m", flags, Policy.OFF)
    assert "VLLM_CPU_KVCACHE_SPACE" not in command.environment
    assert not command.said
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert not engine_command(model, TWO_RANKS, Policy.QUOTA).said


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize(
    ("flags", "size", "room"),
    [
        ([], "4", "room for 43690 tokens (one request may have 40960)"),
        (["--dtype", "float32"], "8", "room for 43690 tokens"),
        (["--max-model-len", "2048"], "1", "room for 10922 tokens (one request may have 2048)"),
        (["--max-model-len", "200000"], "10", "tokens (one request may have 200000)"),
        (["--max-model-len", "auto"], "1", "not known before it is loaded"),
    ],
)
def test_the_cache_holds_a_request_as_long_as_the_models_context(
    flags: list[str], size: str, room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "available_memory", lambda: 41 << 30)
    config = {**QWEN3_30B, "max_position_embeddings": 40960}
    model = checkpoint(tmp_path, **config)
    command = engine_command(model, [*TWO_RANKS, *flags], Policy.QUOTA)
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == size
    assert room in command.said[0]


@pytest.mark.usefixtures("cpu_build")
def test_a_context_that_no_memory_holds_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where layers with a window would cache less, or where the user has chosen a size."""
    monkeypatch.setattr(launch, "available_memory", lambda: 41 << 30)
    config = {**QWEN3_30B, "max_position_embeddings": 400_000}
    model = checkpoint(tmp_path, **config)
    with pytest.raises(ConfigError, match="add --max-model-len 218452") as refused:
        engine_command(model, TWO_RANKS, Policy.QUOTA)
    assert engine_command(model, [*TWO_RANKS, "--max-model-len", "218452"], Policy.QUOTA).said
    assert "--kv-cache-memory-bytes" in str(refused.value)
    engine_command(model, [*TWO_RANKS, "--kv-cache-memory-bytes", "40G"], Policy.QUOTA)
    engine_command(checkpoint(tmp_path, **config, sliding_window=4096), TWO_RANKS, Policy.QUOTA)


def test_a_gpu_server_that_cannot_start_is_refused_and_told_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: False)
    unfit = gpu_packages.Unfit("nccl", "NCCL is old", "pip install nccl", False)
    monkeypatch.setattr(gpu_packages, "unfit_packages", lambda _: [unfit])
    assert engine_command("org/model", TWO_RANKS, Policy.QUOTA).said == (
        "NCCL is old; pip install nccl",
    )
    unfit = unfit._replace(stops=True)
    monkeypatch.setattr(gpu_packages, "unfit_packages", lambda _: [unfit])
    with pytest.raises(ConfigError, match="NCCL is old; pip install nccl"):
        engine_command("org/model", TWO_RANKS, Policy.QUOTA)
    engine_command("org/model", TWO_RANKS, Policy.OFF)


def test_other_builds_get_no_cpu_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: False)
    assert engine_command("org/model", TWO_RANKS, Policy.QUOTA).environment == {}


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
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: False)
    command = engine_command("org/model", flags, Policy.QUOTA)
    assert command.arguments[1:] == [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "org/model",
        *flags,
    ]
    assert command.num_ranks == 8
    assert command.environment == {}
