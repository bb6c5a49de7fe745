"""``benchmarks/check_gpu`` without a GPU: how its parts end, what its file holds, and its kit."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.hidden_packages import hide

pytest.importorskip("triton", reason="the kernels are written in Triton")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "check_gpu"
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [sys.path[0], str(FOLDER), *sys.path[1:]])
    spec = importlib.util.spec_from_file_location("check_gpu", FOLDER / "__main__.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "stop_on_terminate", lambda: None)
    return module


@pytest.fixture
def run(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Exit status and file of a dry run with the given flags."""

    def main(*flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "found.json"
        monkeypatch.setattr(
            sys, "argv", ["check_gpu", "--dry-run", "--json", str(path), *map(str, flags)]
        )
        with pytest.raises(SystemExit) as ended:
            program.main()
        return int(ended.value.code or 0), json.loads(path.read_text())

    return main


def part(program: Any, name: str, script: str, seconds: float = 20.0) -> Any:
    """A part that is a line of shell; ``$0`` is the file that it writes."""
    return program.Part(name, seconds, lambda found, *_: (["sh", "-c", script, str(found)], ""))


@pytest.fixture
def ended(program: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Parts that end in every way."""
    monkeypatch.setattr(program, "SLOW_FACTOR", 1)
    say_names = f"echo at {Path.home()}/x/file.py on {socket.gethostname()}; exit 3"
    parts = (
        part(program, "works", 'echo \'{"what": "it", "passed": true}\' > "$0"'),
        part(program, "fails", say_names),
        part(
            program, "hangs", 'echo \'{"what": 1}\' > "$0"; printf \'{"wh\' >> "$0"; sleep 60', 1.0
        ),
        part(program, "dies", "kill -SEGV $$"),
        part(program, "cannot", "echo no such thing here; exit 77"),
        program.Part("absent", 1.0, lambda *_: ((), "is absent")),
    )
    monkeypatch.setattr(program, "PARTS", parts)
    return run()


def test_every_part_has_an_entry_however_the_ones_before_it_ended(
    ended: tuple[int, dict[str, Any]],
) -> None:
    code, document = ended
    assert code == 1
    results = {name: entry["result"] for name, entry in document["parts"].items()}
    assert results == {
        **{"works": "passed", "fails": "failed", "hangs": "failed", "dies": "failed"},
        **{"cannot": "cannot run", "absent": "cannot run"},
    }
    reasons = {name: entry.get("reason") for name, entry in document["parts"].items()}
    assert reasons["hangs"] == "was not done after 1 s"
    assert reasons["dies"] == "died of SIGSEGV"
    assert reasons["cannot"] == "no such thing here"
    assert reasons["absent"] == "is absent"
    assert document["parts"]["works"]["found"] == [{"what": "it", "passed": True}]
    assert document["parts"]["hangs"]["found"] == [{"what": 1}]


def test_the_file_names_machine_and_commit_but_no_host_and_no_folder(
    ended: tuple[int, dict[str, Any]],
) -> None:
    document = ended[1]
    assert document["commit"]
    assert document["versions"]["torch"]
    assert document["parts"]["fails"]["output"] == ["at .../file.py on HOST"]
    text = json.dumps(document)
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in text


def test_resuming_makes_only_parts_without_a_result_of_this_commit(
    program: Any, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "SLOW_FACTOR", 1)
    once = f"test ! -e {tmp_path}/once && touch {tmp_path}/once"
    parts = part(program, "first", once), part(program, "late", "true", 1000.0)
    monkeypatch.setattr(program, "PARTS", parts)
    _, document = run("--seconds", "100")
    assert document["parts"]["late"]["result"] == "no time"
    code, document = run("--seconds", "1000", "--resume")
    assert [entry["result"] for entry in document["parts"].values()] == ["passed", "passed"]
    assert code == 0
    (tmp_path / "found.json").write_text(json.dumps({**document, "commit": "another"}))
    with pytest.raises(SystemExit, match="another commit"):
        program.main()


def test_without_a_gpu_and_engines_parts_say_what_they_lack(
    program: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["processes"], "find_spec", lambda _: None)
    names = [each.name for each in program.PARTS if each.name not in ("device", "small")]
    names.remove("experts-torch")
    code, document = run("--parts", *names)
    assert code == 0
    reasons = {name: entry["reason"] for name, entry in document["parts"].items()}
    assert reasons["memcheck"] == reasons["synccheck"] == "compute-sanitizer needs a GPU"
    assert reasons["engine"] == "vllm is not installed"
    assert reasons["server-sglang"] == "sglang is not installed"
    assert {entry["result"] for entry in document["parts"].values()} == {"cannot run"}


def test_no_program_of_a_part_needs_pytest(tmp_path: Path) -> None:
    """``pip install ".[vllm,cuda]"`` does not bring it."""
    hide(tmp_path, "pytest")
    programs = ["engine", "servers", "experts", "kernels_torch", "first_token", "small"]
    programs += ["kernels_vllm"] if importlib.util.find_spec("vllm") else []
    root = FOLDER.parents[1]
    folders = [tmp_path, root, root / "kernels", FOLDER.parent]
    folders += [FOLDER, FOLDER.parent / "device"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", f"import {', '.join(programs)}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.interpreter
def test_experts_in_slots_give_the_answers_of_their_masters(run: Run) -> None:
    code, document = run("--parts", "experts-torch")
    entry = document["parts"]["experts-torch"]
    assert code == 0, entry
    (found,) = entry["found"]
    assert found["assignments_to_copies"] > 0
    assert found["largest_difference"] <= 0.02


def test_the_sheet_has_what_was_found_and_names_what_is_missing(program: Any) -> None:
    emulated = json.loads((FOLDER.parent / "results" / "gpu-emulated.json").read_text())
    text = program.sheet(emulated)
    assert "| vllm, eager | 32 of 32 |" in text
    assert "Missing: part `first-token`" in text
