"""/dev/shm: its size, and what dead servers left there."""

import mmap
import os
from pathlib import Path

import pytest

from tests.support.findings import GIB, MOE
from tests.support.ring_files import create
from ultraep_serve.config import BalanceConfig
from ultraep_serve.doctor import host_machine as shared_memory
from ultraep_serve.doctor.finding import Status, Subject
from ultraep_serve.doctor.host_machine import check_leftovers, check_shared_memory, ring_bytes
from ultraep_serve.telemetry.run_directory import run_directory
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape


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
    finding = check_shared_memory(Subject(num_ranks=4), tmp_path)
    assert finding.status is status
    assert ("shm" in finding.remedy) == (status is not Status.OK)


def test_shared_memory_must_be_there(tmp_path: Path) -> None:
    missing = check_shared_memory(Subject(), tmp_path / "none")
    assert missing.status is Status.ERROR


def test_ring_bytes_are_what_recorders_take(tmp_path: Path, model: str) -> None:
    subject = Subject(model=model, num_ranks=2, num_slots=3)
    records = BalanceConfig().ring_records
    shape = ExpertShape(2, MOE["num_experts"], 3)
    for rank in range(2):
        create(tmp_path, rank, shape, num_layers=4, ring_records=records).close()
    assert ring_bytes(subject) == sum(
        RunFiles(tmp_path).ring(rank).stat().st_size for rank in range(2)
    )


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
