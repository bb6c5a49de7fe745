"""The unit for systemd: what systemd says of it, and what its command starts."""

import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from commands import check_parallelism, our_flags, read_flags
from files import DEPLOY

UNIT = DEPLOY / "systemd" / "ultraep-serve.service"


def verify(tmp_path: Path) -> str:
    """What `systemd-analyze verify` finds in the unit, with an interpreter that is here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: Debian's package systemd has it")
    text = UNIT.read_text().replace("/opt/ultraep-serve/bin/ultraep-serve", sys.executable)
    path = tmp_path / UNIT.name
    path.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "\n".join(line for line in done.stderr.splitlines() if UNIT.name in line)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    assert verify(tmp_path) == ""


def test_the_unit_starts_a_balanced_server_again_when_it_ends() -> None:
    parser = ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    service = parser["Service"]
    program, *line = shlex.split(service["ExecStart"])
    assert Path(program).name == "ultraep-serve"
    _, flags = our_flags(line)
    assert line[0] == "vllm"
    check_parallelism("vllm", read_flags("vllm", flags))
    assert service["Restart"] == "always"  # vLLM ends with status 0 when its engine has died
