"""Cores, and memory that ranks open to each other."""

import os
from pathlib import Path

from ultraep_serve.doctor.finding import Status, Subject
from ultraep_serve.doctor.host_machine import check_cores, check_memory_access, check_scheduling


def test_cores_against_ranks_and_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    assert check_cores(Subject(num_ranks=1), quota).status is Status.OK
    many = check_cores(Subject(num_ranks=cores + 1), quota)
    assert (many.status, "share a core" in many.seen) == (Status.WARNING, True)
    assert f"--ranks {cores + 1}" in many.remedy
    quota.write_text("50000 100000\n")
    throttled = check_cores(Subject(num_ranks=1), quota)
    assert (throttled.status, "quota is 0.5" in throttled.seen) == (Status.WARNING, True)
    quota.write_text("max 100000\n")
    assert check_cores(Subject(num_ranks=1), quota).status is Status.OK


def test_cores_shared_out_by_session() -> None:
    grouped = check_scheduling(grouped=True, has_gpus=False)
    assert grouped.status is Status.WARNING
    assert "sysctl -w kernel.sched_autogroup_enabled=0" in grouped.remedy
    assert check_scheduling(grouped=True, has_gpus=True).status is Status.OK
    assert check_scheduling(grouped=False, has_gpus=False).status is Status.OK


def test_memory_access_is_tried() -> None:
    assert check_memory_access().status is Status.OK


def test_memory_access_without_proc_is_an_error(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    finding = check_memory_access(tmp_path)
    assert finding.status is Status.ERROR
    assert "FileNotFoundError" in finding.seen
    assert len(os.listdir("/proc/self/fd")) == before
