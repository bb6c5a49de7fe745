"""Models: experts that divide over ranks, and memory for slots."""

from pathlib import Path

import pytest

from tests.support.findings import EXPERT_BYTES, GIB, only
from ultraep_serve.doctor.finding import Status, Subject
from ultraep_serve.doctor.model import check_model
from ultraep_serve.system.machine import free_port
from ultraep_serve.telemetry.run_directory import run_directory


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
    (tmp_path / "memory.current").write_text(str(30 << 20))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {20 << 20}\n")
    limited = check_model(subject, machine(tmp_path, 64 * GIB), tmp_path)[-1]
    assert (limited.status, "90.0 MiB available" in limited.seen) == (Status.ERROR, True)


def test_pipeline_stages_share_the_weights_and_have_slots_each(model: str, tmp_path: Path) -> None:
    four = Subject(model=model, num_ranks=2, num_stages=2, all_host_ranks=4)
    alone, staged = (
        check_model(each, machine(tmp_path, 64 * GIB), tmp_path)
        for each in (Subject(model=model), four)
    )
    assert staged[0] == alone[0]  # experts are divided over the ranks of a stage
    assert alone[2].seen.split(" and ")[0] == staged[2].seen.split(" and ")[0]
    assert "slots 24.0 MiB on this host" in staged[2].seen  # 4 ranks x 2 slots x 3 MiB


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
