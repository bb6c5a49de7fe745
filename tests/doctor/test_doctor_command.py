"""The command itself: texts, JSON, exit codes, flags, and what it must not import."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ultraep_serve.cli import main
from ultraep_serve.doctor import diagnose
from ultraep_serve.doctor.finding import Finding, Status, Subject
from ultraep_serve.system.machine import free_port


def test_every_problem_has_a_remedy(model: str, shm: Path) -> None:
    findings = diagnose(Subject(model=model, num_ranks=3, port=free_port()))
    assert {"engine", "gpus", "cores", "memory access", "shared memory", "model", "ports"} <= {
        finding.name for finding in findings
    }
    assert all(bool(finding.remedy) == (finding.status is not Status.OK) for finding in findings)


def test_json_and_exit_code(model: str, shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model-config", model, "--ep", "3", "--json", "-"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["counts"]["error"] >= 1
    names = {field.name for field in dataclasses.fields(Finding)}
    assert all(set(finding) == names for finding in document["findings"])
    assert sum(document["counts"].values()) == len(document["findings"])


def test_text_shows_marks_and_remedies(
    model: str, shm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--model-config", model, "--ep", "3"]) == 1
    shown = capsys.readouterr().out
    assert "✘" in shown
    assert "→ choose a number of ranks that divides 16" in shown


@pytest.mark.parametrize("flags", [["--port", "0"], ["--port", "65536"], ["--ep", "0"]])
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert "must be" in capsys.readouterr().err


def test_no_engine_is_imported() -> None:
    code = (
        "import sys; from ultraep_serve.doctor import *; diagnose(Subject());"
        "sys.exit(str({'vllm', 'sglang', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize(
    ("command", "ranks", "here", "domain"),
    [
        ("vllm M --tensor-parallel-size=8 -ep", 8, 8, 8),
        ("vllm M -tp 16 -ep --nnodes 2 --node-rank 1 --headless", 16, 8, 8),
        ("vllm M -dp 16 -dpl 4 -ep --domain-size 2", 16, 4, 2),
        ("vllm M -tp 4 -pp 2 -ep", 4, 4, 4),
        ("vllm M -tp 4 -pp 2 -dp 4 -dpl 2 -ep", 16, 8, 8),
        ("vllm M -tp 8 -pp 2 -ep --nnodes 2", 8, 8, 8),
        ("vllm M -tp 16 -pp 2 -ep --nnodes 4", 16, 8, 8),
        ("sglang M --tp-size 16 --ep-size 16 --nnodes 4 --dist-init-addr a:1", 16, 4, 4),
    ],
)
def test_the_serving_command_says_how_ranks_lie(
    command: str,
    ranks: int,
    here: int,
    domain: int,
    shm: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["doctor", "--json", "-", *command.split(), "--port", str(free_port())])
    findings = json.loads(capsys.readouterr().out)["findings"]
    figures = {finding["name"]: finding["figures"] for finding in findings}
    assert figures["hosts"] == {"ranks": ranks, "ranks_here": here, "hosts": ranks // here}
    assert figures["domains"]["domain_size"] == domain
    ports = [finding["seen"] for finding in findings if finding["name"] == "ports"]
    assert any("the server" in seen for seen in ports) is ("--headless" not in command)


@pytest.mark.parametrize("content", ["{", "[1]", '"x"'])
def test_a_broken_model_is_an_error(
    content: str, model: str, installed: None, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(model) / "config.json").write_text(content)
    assert main(["doctor", "--json", "-", "vllm", model, "-tp", "2", "-ep"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    wrong = {finding["name"] for finding in findings if "JSON" in finding["seen"]}
    assert {"model", "command"} <= wrong


def test_hosts_that_differ_end_with_an_error(shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "vllm", "M", "-dp", "16", "-dpl", "6", "-ep"]) == 1
    assert "equally many ranks on each host" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "slots"), [("", 2), ("--enable-dbo", 4), ("--ubatch-size 3", 6)])
def test_overlapping_micro_batches_have_slots_of_their_own(
    model: str, flags: str, slots: int, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--json", "-", "vllm", model, "-tp", "2", "-ep", *flags.split()])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (seen,) = (finding["seen"] for finding in findings if finding["name"] == "slots")
    assert seen.startswith(f"{slots} per rank")
