"""The report: whole with a server, a stopped one and none; and it names nobody."""

import json
import socket
import zipfile
from pathlib import Path

import pytest

from tests.support.rings import SyntheticRun, planned_run
from ultraep_serve.cli import main
from ultraep_serve.doctor.anonymous import Anonymiser
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.self_check import SelfCheck, SelfCheckOutcome
from ultraep_serve.types import CheckResult

HOST, USER, TOKEN = "gpu-box-17", "mary.major", "s3cr3t-of-the-sidecar"
KEY, ADDRESS, HOME = "hf_abcdefGHIJKL0123", "10.11.12.13", "/srv/people/mary.major"
PLANTED = (HOST, USER, TOKEN, KEY, ADDRESS, HOME, "fd00:12::99", "open-the-door", "a-question")


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine and its user have names."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(socket, "getfqdn", lambda: f"{HOST}.corp.example")
    for name, value in (("USER", USER), ("LOGNAME", USER), ("HOME", HOME), ("SOME_API_KEY", KEY)):
        monkeypatch.setenv(name, value)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """Of a run whose files are full of secrets."""
    path = tmp_path / "run"
    path.mkdir()
    run: SyntheticRun = planned_run(path)
    settings = json.loads((path / "config.json").read_text())
    settings["sidecar"] = {"host": ADDRESS, "allowed_hosts": f"{HOST}, other-box", "port": 1}
    settings["costs"] = f"{HOME}/costs.json"
    (path / "config.json").write_text(json.dumps(settings))
    (path / "token").write_text(TOKEN)
    detail = f"on {HOST} of {USER} ({ADDRESS}), in {HOME}/x with {TOKEN}"
    found = SelfCheck(SelfCheckOutcome.FAILED, (CheckResult("kernels", 1.0, detail),))
    for recorder in run.recorders:
        recorder.set_self_check(found)
        recorder.set_unheard(f"rank 1 on {HOST}.corp.example")
    RunFiles(path).verification(1).write_text(json.dumps({"seen": detail, "loads": [1, 2]}))
    run.batch()
    run.close()
    return path


def packed(report: Path, *flags: str) -> dict[str, str]:
    """The files of a report."""
    assert main(["doctor", "--report", str(report), *flags]) in (0, 1)
    assert report.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(report) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.usefixtures("somebody", "shm")
def test_a_run_is_whole_and_names_nobody(tmp_path: Path, run_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        f"(Worker pid=1) INFO 11-24 16:00:00 [setup.py:259] ultraep: ready on {HOST}\n"
        f"INFO Received request: prompt: 'a-question on ultraep: yes', {USER}\n"
        f"ultraep: token=open-the-door from [fd00:12::99] and {ADDRESS}\n"
    )
    files = packed(tmp_path / "report.zip", "--run-dir", str(run_path), "--log", str(log))
    assert {name for name in files if name.endswith(".json")} == {
        "doctor.json",
        "versions.json",
        "hardware.json",
        "settings.json",
        "balance.json",
        "ranks.json",
        "verification-1.json",
    }
    for name, content in files.items():
        for secret in PLANTED:
            assert secret not in content, (name, secret)
    assert json.loads(files["balance.json"])["self_check"]["result"] == "failed"
    assert json.loads(files["settings.json"])["slots"] == 2
    assert json.loads(files["ranks.json"])[1]["self_check"]["checks"][0]["name"] == "kernels"
    assert json.loads(files["verification-1.json"])["loads"] == [1, 2]
    assert len(files["records.jsonl"].splitlines()) == 12
    assert json.loads(files["records.jsonl"].splitlines()[0])["rank"] == 0
    assert "ultraep_verified_layers_total" in files["metrics.txt"]
    assert "16:00:00 [setup.py:259] ultraep: ready on HOST" in files["log.txt"]
    assert json.loads(files["doctor.json"])["findings"]


@pytest.mark.usefixtures("somebody", "shm")
def test_without_a_server_it_is_of_the_machine(tmp_path: Path) -> None:
    files = packed(tmp_path / "report.zip")
    assert "no server" in files["README.txt"]
    assert "No log was given" in files["log.txt"]
    assert "balance.json" not in files
    assert json.loads(files["versions.json"])["python"]


@pytest.mark.usefixtures("shm")
def test_damaged_files_are_no_accident(tmp_path: Path, run_path: Path) -> None:
    (run_path / "ring-0").write_bytes(b"nonsense")
    (run_path / "config.json").write_bytes(b"\xff")
    (run_path / "verification-1").write_bytes(b"\xff\x00")
    files = packed(tmp_path / "report.zip", "--run-dir", str(run_path))
    assert json.loads(files["settings.json"]) is None
    assert len(json.loads(files["ranks.json"])) == 3


def test_what_names_nobody_stays() -> None:
    anonymous = Anonymiser(["node-a.example"], [])
    for text in ("16:00:00 127.0.0.1 [::1] 0.0.0.0:8000", "vLLM 0.32.1, 3 tokens: 12", "std::map"):
        assert anonymous(text) == text
    assert anonymous("node-a and NODE-A.example, node-abc") == "HOST and HOST, node-abc"
    assert anonymous("/home/jane/m /root/x a@b.de https://u:p@h/") == (
        "HOME/m HOME EMAIL https://SECRET@h/"
    )
