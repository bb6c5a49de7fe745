"""Which servers run on this machine."""

from pathlib import Path

import pytest

from tests.support.ring_files import SHAPE, create
from ultraep_serve.errors import NoServerError
from ultraep_serve.telemetry import run_directory
from ultraep_serve.telemetry.run_directory import RunDirectory, find_run


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_without_a_server_the_error_says_how_to_start_one(shared_memory: Path) -> None:
    for find in (find_run, lambda: find_run(port=8000), lambda: find_run(shared_memory / "gone")):
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
        find_run()
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
