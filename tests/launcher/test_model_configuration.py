"""A model's config.json that somebody else has written, or that is no file at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ultraep_serve.cli import main
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.engine import check_experts, count_experts


def gigabytes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "directory": (Path.mkdir, "is not a regular file"),
    "circle": (lambda path: path.symlink_to(path), "symbolic links"),
    "broken": (lambda path: path.write_text('{"num_experts": 8,'), "is not JSON"),
    "empty": (Path.touch, "is not JSON"),
    "deep": (lambda path: path.write_text("[" * 100_000), "is not JSON"),
    "digits": (lambda path: path.write_text('{"num_experts": %s}' % ("9" * 5000)), "is not JSON"),
    "list": (lambda path: path.write_text("[1, 2]"), "must be a JSON object"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe{}"), "cannot be read"),
    "gigabytes": (gigabytes, "more than 64 MiB"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_is_one_line_with_a_remedy(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = DAMAGES[damage]
    make(tmp_path / "config.json")
    assert main(["vllm", str(tmp_path), "-tp", "2", "-ep", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "mend it or fetch the model again" in line
    with pytest.raises(ConfigError, match=r"config\.json"):
        count_experts(str(tmp_path))  # as the doctor reads it


@pytest.mark.parametrize("model", ["org/name", "a" * 200, "config.json/x"])
def test_a_model_that_is_not_here_is_left_to_the_engine(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").touch()
    check_experts(model, "vLLM", BalanceConfig(), 2)
    assert count_experts(model) is None
