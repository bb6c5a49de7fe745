"""`ultraep_lab.api`, its page and its notebook, and policies of users."""

import doctest
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_lab import api
from ultraep_lab.comparators import policy_function
from ultraep_serve.cli import main
from ultraep_serve.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"
LOADS = np.array([[40, 5, 0, 1], [10, 4, 1, 3]])


@pytest.fixture
def at_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the examples as a clone has them, which is the current one."""
    shutil.copytree(DOCS / "examples", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_the_page_is_true(at_docs: Path) -> None:
    failed, tried = doctest.testfile(str(DOCS / "api.md"), module_relative=False)
    assert tried > 15
    assert not failed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"speeds": [2, 1]}, "speeds = 2 must be less than or equal to 1"),
        ({"speeds": [1, float("nan")]}, "speeds = nan must be a number"),
        ({"domain_size": 1.5}, "domain_size = 1.5 must be a whole number"),
        ({"ranks": 3}, "of 2 ranks, not 3"),
        ({"loads": LOADS[0]}, "need ranks"),
        ({"loads": LOADS / 2}, "loads is float64"),
        ({"loads": LOADS << 58}, "must be 0 to 2147483647"),
        ({"loads": [[1, 2], [3]]}, "no array of integers"),
        ({"history": LOADS}, "history is int64 (2, 4)"),
        ({"history": LOADS[None] - 100}, "history has -60"),
    ],
)
def test_a_plan_refuses_what_commands_refuse(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        api.plan(**{"loads": LOADS, **wrong})


def test_the_notebook_runs(at_docs: Path) -> None:
    """Its cells print, one after another in a process of their own, the outputs that it shows."""
    cells = json.loads((DOCS / "examples" / "replay.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (at_docs / "cells.py").write_text("\n\n".join(code))
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=at_docs, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert done.stdout == "".join(line for output in outputs for line in output.get("text", ()))


def write_policy(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(f"def place(loads, context, history):\n    {body}\n")
    return f"{folder / 'mine.py'}:place"


def replayed(folder: Path, body: str, capsys: Any) -> tuple[int, str]:
    """Exit code and what is on standard error, of a replay with a policy of one line."""
    trace = folder / "trace.npz"
    api.save_trace(trace, api.LoadTrace(loads=LOADS[None, None]))
    words = ["replay", str(trace), "--ep", "2", "--slots", "1", "--policies"]
    code = main([*words, f"quota,{write_policy(folder, body)}"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return loads", r"\(E, R\) = \(4, 2\), not \(2, 4\)"),
        ("return loads.T / 2", "is float64"),
        ("return loads.T * 0", "sum to the loads"),
        ("return None", "is object"),
        ("q = loads.T.copy(); q[0] = 51, -1; return q", "has -1, must be 0 to"),
        ("q = loads.T.copy(); loads[:] = 0; return q", "more experts than it has room for"),
    ],
)
def test_a_wrong_plan_of_a_user_is_an_error(
    tmp_path: Path, capsys: Any, body: str, problem: str
) -> None:
    """It names policy, batch and layer; what it does to its arguments reaches nobody."""
    code, error = replayed(tmp_path, body, capsys)
    assert code == 1
    assert "policy mine.py:place, batch 0, layer 0: broken plan" in error
    assert re.search(problem, error)


def test_a_right_plan_of_a_user_stands_beside_the_others(tmp_path: Path, capsys: Any) -> None:
    body = "q = loads.T * 0; q[:2, 0], q[2:, 1] = loads.sum(0)[:2], loads.sum(0)[2:]; return q"
    trace = tmp_path / "trace.npz"
    api.save_trace(trace, api.LoadTrace(loads=LOADS[None, None]))
    words = ["replay", str(trace), "--ep", "2", "--json", "-"]
    assert main([*words, "--policies", f"off,{write_policy(tmp_path, body)}"]) == 0
    document = json.loads(capsys.readouterr().out)
    off, mine = document["policies"]["off"], document["policies"]["mine.py:place"]
    assert mine["imbalance_after"] == off["imbalance_after"]
    assert document["layers"][0]["imbalance_after"]["mine.py:place"] == pytest.approx(59 / 32)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py:place", "no Python file"),
        ("mine.py:other", "no function"),
        ("best", r"choose from off.*FILE\.py:NAME"),
    ],
)
def test_unknown_policies_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    write_policy(tmp_path, "return loads")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        policy_function(name)
