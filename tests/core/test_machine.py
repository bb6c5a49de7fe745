"""What this machine, and the control groups that this process is in, leave it."""

from pathlib import Path

import pytest

from ultraep_serve.system import machine


def group(path: Path, limit: str, used: int, cached: int = 0) -> None:
    path.mkdir(exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\n")


def first_version(path: Path, limit: str, used: int, cached: int = 0) -> None:
    path.mkdir(exist_ok=True, parents=True)
    unlimited = str((1 << 63) - 4096)
    (path / "memory.limit_in_bytes").write_text(unlimited if limit == "max" else limit)
    (path / "memory.usage_in_bytes").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"inactive_file 3\ntotal_inactive_file {cached}\n")


@pytest.mark.parametrize(
    ("own", "available"),
    [
        ("0::/outer/inner\n", 700),  # the outer one has less left
        ("12:cpuset:/\n0::/outer\n", 700),
        ("0::/\n", 4096),
        ("0::/../elsewhere\n", 4096),  # of another container
        ("4:memory:/outer/inner\n0::/\n", 600),  # of version 1
        (None, 4096),  # no /proc
    ],
)
def test_every_group_around_a_process_limits_it(
    own: str | None, available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, own_group = tmp_path / "meminfo", tmp_path / "own"
    meminfo.write_text("MemAvailable: 4 kB\n")
    if own is not None:
        own_group.write_text(own)
    monkeypatch.setattr(machine, "_OWN_CONTROL_GROUP", own_group)
    group(tmp_path / "outer", "1000", used=500, cached=200)
    group(tmp_path / "outer/inner", "max", used=400)
    first_version(tmp_path / "memory/outer", "900", used=500, cached=200)
    first_version(tmp_path / "memory/outer/inner", "max", used=400)
    assert machine.available_memory(meminfo, tmp_path) == available


def test_what_processes_may_take_together_is_what_the_smallest_limit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_OWN_CONTROL_GROUP", tmp_path / "none")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 4 kB\n")
    assert machine.total_memory(meminfo, tmp_path) == 100 << 10
    group(tmp_path, "2000", used=1900)
    assert machine.total_memory(meminfo, tmp_path) == 2000
    (tmp_path / "memory.max").unlink()
    assert machine.total_memory(tmp_path / "unknown", tmp_path) == 0


def test_groups_without_a_limit_are_not_known_to_leave_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_OWN_CONTROL_GROUP", tmp_path / "none")
    group(tmp_path, "max", used=400)
    first_version(tmp_path / "memory", "max", used=400)
    assert machine.available_memory(tmp_path / "unknown", tmp_path) is None


def test_a_group_that_is_full_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_OWN_CONTROL_GROUP", tmp_path / "none")
    group(tmp_path, "1000", used=1200)
    assert machine.available_memory(tmp_path / "unknown", tmp_path) == 0
