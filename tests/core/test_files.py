"""Output files: links, devices and pipes stay what they are; what others left is not followed."""

import json
import os
import threading
from pathlib import Path

import pytest

from ultraep_lab.outputs import prepare_output, whole_file, write_json
from ultraep_serve.errors import OutputError
from ultraep_serve.system.files import write_whole


def write_half(path: Path) -> None:
    with whole_file(path) as part:
        part.write_text("half")
        raise ValueError("nan")


def test_a_links_target_is_written_and_the_link_stays(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    for number in (1, 2):  # at first there is no target
        write_json(link, {"a": number})
        assert link.is_symlink()
        assert json.loads(target.read_text()) == {"a": number}
    with pytest.raises(ValueError, match="nan"):
        write_half(link)
    assert json.loads(target.read_text()) == {"a": 2}
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_json(path, {})
    reader.join(60)
    assert read == ["{}\n"]
    assert path.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_device_stays_one(tmp_path: Path) -> None:
    """As root it would be replaced by a file for everybody, so here one of our own is attacked."""
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    prepare_output(path)
    write_json(path, {})
    assert path.is_char_device()
    assert os.listdir(tmp_path) == ["null"]


def test_a_target_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "loop"):
        with pytest.raises(OutputError, match="cannot be written"):
            write_json(tmp_path / name, {})


def test_files_for_other_processes_never_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
