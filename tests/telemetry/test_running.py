"""Which servers run on this machine; and directories that were deleted under them."""

import shutil
from pathlib import Path

import pytest

from tests.support.ring_files import SHAPE, create
from ultraep_serve.errors import NoServerError
from ultraep_serve.telemetry import run_directory
from ultraep_serve.telemetry.run_directory import (
    RunDirectory,
    hold,
    remove_abandoned,
    running_run_directories,
)
from ultraep_serve.telemetry.running import find_run, running_run


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_without_a_server_the_error_says_how_to_start_one(shared_memory: Path) -> None:
    for find in (running_run, lambda: running_run(8000), lambda: find_run(shared_memory / "gone")):
        with pytest.raises(NoServerError, match="start one with `ultraep-serve vllm MODEL`"):
            find()


def test_the_only_server_is_found(shared_memory: Path) -> None:
    (shared_memory / "elsewhere").mkdir()
    directory = RunDirectory.create("8000")
    (shared_memory / directory.path.name.replace("8000", "8001")).mkdir()  # of a killed one
    assert find_run() == find_run(port=8000) == directory.path
    assert find_run(shared_memory / "elsewhere") == shared_memory / "elsewhere"
    with pytest.raises(NoServerError, match="on port 8001"):
        find_run(port=8001)
    directory.leave()


def test_several_servers_are_listed_with_what_tells_them_apart() -> None:
    loading, serving = RunDirectory.create("8000"), RunDirectory.create("abcd")
    recorder = create(serving.path, engine="sglang")
    (serving.path / "ring-x").write_text("no ring")
    with pytest.raises(NoServerError) as raised:
        running_run()
    head, first, second = str(raised.value).splitlines()
    assert "2 balanced servers" in head
    assert "--run-dir" in head
    assert first.split() == [str(loading.path), "no", "rank", "has", "joined", "yet"]
    assert str(serving.path) in second
    assert f"sglang, {SHAPE.num_ranks} ranks, rank 0 is process" in second
    assert "since 2" in second
    recorder.close()
    loading.leave()
    serving.leave()


def test_a_deleted_directory_is_made_again_and_held(shared_memory: Path) -> None:
    directory = RunDirectory.create("8000")
    shutil.rmtree(directory.path)
    assert running_run_directories() == []
    hold(directory.path)
    hold(directory.path)  # as several parts of a process may
    assert directory.path.stat().st_mode & 0o777 == 0o700
    remove_abandoned()
    assert running_run_directories() == [directory.path]
    directory.leave()
    assert list(shared_memory.iterdir()) == []


def test_other_directories_are_not_made(shared_memory: Path) -> None:
    for path in (shared_memory / "mine", shared_memory / "deep" / "ultraep-0-8000"):
        hold(path)
        assert not path.exists()
