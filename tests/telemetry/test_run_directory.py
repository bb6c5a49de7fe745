"""Run directories: whose they are, what is left of them, and how ranks without a launcher meet."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.hosts import engine_group
from tests.support.ranks import outcomes_of_ranks, run_ranks
from ultraep_serve.balance.agreement import find_location
from ultraep_serve.cli import main
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.run import meet
from ultraep_serve.errors import ConfigError, SharedMemoryError
from ultraep_serve.telemetry import run_directory as module
from ultraep_serve.telemetry.run_directory import (
    RunDirectory,
    name_of_run,
    process_of_run,
    remove_abandoned,
    remove_when_left,
    running_run_directories,
)


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm, so that servers of this machine are left alone."""
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_two_runs_of_one_name_collide(shared_memory: Path) -> None:
    first, second = RunDirectory.create("8000"), RunDirectory.create("8001")
    with pytest.raises(ConfigError, match="belongs to a run of this user already"):
        RunDirectory.create("8000")
    assert first.path.exists()
    assert second.path.exists()
    first.leave()
    RunDirectory.create("8000").leave()
    second.leave()


def test_what_a_killed_server_left_is_removed(shared_memory: Path) -> None:
    mine = f"ultraep-{os.getuid()}"
    for name in (f"{mine}-8000", f"{mine}-8001"):
        (shared_memory / name).mkdir()
        (shared_memory / name / "ring-0").touch()
    (shared_memory / f"{mine}-8002").mkdir()  # killed before it had a lock
    (shared_memory / f"{mine}-file").touch()
    foreign = shared_memory / "ultraep-99999999-8000"
    foreign.mkdir()
    path = RunDirectory.create("8000").path
    assert {p for p in shared_memory.iterdir() if p.is_dir()} == {path, foreign}


def test_entries_of_others_are_left_alone(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that begin like this user's, made by another one; links to directories of this user."""
    held = RunDirectory.create("held")
    target = shared_memory / "mine"
    target.mkdir(mode=0o700)
    link = module._path_of("8001")
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="not a directory of this user's"):
        RunDirectory.create("8001")
    with pytest.raises(ConfigError, match="cannot be used"):
        RunDirectory.join("8001")
    assert running_run_directories() == [held.path]

    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    foreign = module._path_of("8002")  # of this process's user, who is another one now
    foreign.mkdir(mode=0o700)
    lock = os.open(foreign, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    assert running_run_directories() == []
    with pytest.raises(ConfigError, match="not a directory of this user's"):
        RunDirectory.create("8002")
    with pytest.raises(ConfigError, match="cannot be used"):
        RunDirectory.join("8002")
    os.close(lock)
    remove_abandoned()
    assert link.is_symlink()
    assert foreign.is_dir()


LOCKER = """
import fcntl, os, sys
directory = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(directory, fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_process_that_locks_shared_memory_is_named(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user can do that, and nobody waits for ever."""
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    directory = RunDirectory.create("8000")
    command = [sys.executable, "-c", LOCKER, str(shared_memory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as locker:
        assert locker.stdout is not None
        assert locker.stdout.readline() == b"locked\n"
        for call in (lambda: RunDirectory.create("8001"), running_run_directories):
            with pytest.raises(SharedMemoryError) as raised:
                call()
            who = (f"process {locker.pid}", "another process")  # some file systems hide it
            assert str(raised.value).startswith(
                tuple(f"{name} keeps {shared_memory} locked" for name in who)
            )
        assert main(["status"]) == 2
        directory.leave()
        assert directory.path.exists()  # others may be about to join
        locker.kill()
    remove_abandoned()
    assert list(shared_memory.iterdir()) == []


def test_the_last_process_to_leave_removes_it(shared_memory: Path) -> None:
    first = RunDirectory.create("x")
    assert first.path.stat().st_mode & 0o777 == 0o700
    second = RunDirectory.join("x")
    (first.path / "ring-0").write_bytes(b"x")
    first.leave()
    first.leave()  # once is enough
    assert running_run_directories() == [second.path]
    second.leave()
    assert list(shared_memory.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be used"):
        RunDirectory.join("x")


def test_deleting_files_frees_nothing(shared_memory: Path) -> None:
    """Some start scripts delete all files in shared memory."""
    directory = RunDirectory.create("8000")
    (directory.path / "ring-0").touch()
    for file in directory.path.iterdir():
        file.unlink()
    other = RunDirectory.create("8001")
    assert running_run_directories() == [directory.path, other.path]
    shutil.rmtree(directory.path)
    again = RunDirectory.create("8000")
    assert again.path == directory.path
    for each in (directory, other, again):
        each.leave()
    assert list(shared_memory.iterdir()) == []


def test_a_run_is_removed_when_its_last_rank_is_gone(shared_memory: Path) -> None:
    """And those of which all ranks were killed at once."""
    mine, killed, other = (RunDirectory.create(name_of_run(n, 1)) for n in (123, 124, 1234))
    os.close(killed._lock)
    remove_when_left(mine.path, 0.3)  # still held
    assert set(shared_memory.iterdir()) == {mine.path, other.path}
    os.close(mine._lock)
    remove_when_left(mine.path, 60.0)
    assert list(shared_memory.iterdir()) == [other.path]
    killed._lock = mine._lock = -1
    other.leave()


def test_containers_that_share_memory_do_not_collide(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process id in another namespace of processes."""
    mine = RunDirectory.create(name_of_run(1, 7))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "process_namespace", lambda: 8)
        assert name_of_run(1, 7) not in mine.path.name
        assert process_of_run(mine.path) is None
    assert process_of_run(mine.path) == 1
    mine.leave()


def met(rank: int, run_path: Path, shm: Path, config: BalanceConfig) -> tuple[str, bool]:
    """Two ranks each of two runs meet, both at once; 0 and 1 are of one, 2 and 3 of the other."""
    module.SHARED_MEMORY = shm
    run, own = divmod(rank, 2)
    group = engine_group(run_path / str(run), own, 2)
    location = find_location(config, own, group)
    directory = meet(config, location, group)
    (directory / str(own)).touch()
    dist.barrier(group.on_host)  # nobody leaves before all have come
    both = {"0", "1", "config.json"} == {path.name for path in directory.iterdir()}
    return directory.name, both


def test_ranks_meet_without_a_launcher_and_runs_do_not_mix(run_path: Path, tmp_path: Path) -> None:
    for name in ("0", "1"):
        (run_path / name).mkdir()
    outcomes = run_ranks(met, 4, run_path, tmp_path, BalanceConfig())
    names = [name for name, _ in outcomes]
    assert names[0] == names[1] != names[2] == names[3]
    assert all(both for _, both in outcomes)


def test_a_run_directory_that_cannot_be_made_is_an_error_of_every_rank(
    run_path: Path, tmp_path: Path
) -> None:
    (run_path / "0").mkdir()
    config = BalanceConfig(sidecar={"host": "192.0.2.1", "port": 8001})  # not of this machine
    outcomes = outcomes_of_ranks(met, 2, run_path, tmp_path, config)
    assert [outcome.error for outcome in outcomes] == ["ConfigError", "FabricError"]
    assert "the sidecar cannot listen on 192.0.2.1:8001" in outcomes[0].message
    assert "rank 0 could not make a run directory" in outcomes[1].message
