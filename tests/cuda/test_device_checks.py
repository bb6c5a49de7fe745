"""All checks of kernels, as ``benchmarks/device`` makes them; here at tiny sizes, interpreted.

The parts run once, without pytest, and those that a bare GPU machine runs without what else such a
machine lacks; then every check is a test by its own name.
"""

import ast
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hidden_packages import hide

pytestmark = pytest.mark.interpreter
pytest.importorskip("triton", reason="the kernels are written in Triton")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "device"
ROWS = {
    "routing": ["plan", "count + reroute"],
    "layer-qwen3": ["layer of nothing real"],
    "stream": ["stream, relay never", "stream, relay always"],
    "layer-deepseek": ["layer of nothing real"],
    "layer-demo": ["layer of nothing real"],
    "layer-sheet": ["layer of nothing real"],
    "balancer": ["balancer", "layer that is left alone"],
    "exchange": ["exchange"],
    "processes": ["4 processes, direct and relayed", "one of them is killed"],
    "slots": ["slots behind masters"],
}
PARTS_OF_CHECKS = ("checks", "checks-of-balancers")
NOT_ON_BARE_MACHINES = ("fastapi", "httpx", "prometheus_client", "pydantic", "rich", "scipy")
CHECKS = [
    f"{path.name}::{statement.name}"
    for path in sorted(Path(__file__).parent.glob("check_*.py"))
    for statement in ast.parse(path.read_text()).body
    if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_")
]


def run(*arguments: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    """``path`` comes first where packages are looked for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(FOLDER), *arguments],
        capture_output=True,
        text=True,
        timeout=840,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": found},
    )


def report_of(folder: Path, parts: list[str]) -> dict[str, Any]:
    """What a dry run of ``parts`` wrote, and its output where it printed what went wrong.

    Packages are looked for in ``folder`` first, where it also writes.
    """
    arguments = [argument for part in parts for argument in ("--part", part)]
    done = run("--dry-run", "--json", str(folder / "dry.json"), *arguments, path=str(folder))
    report = json.loads((folder / "dry.json").read_text())
    return {**report, "code": done.returncode, "output": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of all parts on a bare machine, and of the tests' own checks; they run beside each other."""
    runs = [(list(ROWS), ("pytest", *NOT_ON_BARE_MACHINES))]
    runs += [([part], ("pytest",)) for part in PARTS_OF_CHECKS]
    folders = [tmp_path_factory.mktemp(parts[0]) for parts, _ in runs]
    for folder, (_, packages) in zip(folders, runs, strict=True):
        hide(folder, *packages)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(report_of, folders, [parts for parts, _ in runs]))


@pytest.fixture
def bare_report(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return reports[0]


def test_a_dry_run_makes_every_part_in_order(bare_report: dict[str, Any]) -> None:
    assert bare_report["code"] == 0, bare_report["output"]
    assert bare_report["dry_run"]
    assert bare_report["gpu"] is None
    assert set(bare_report["launches_per_layer"]) == {
        "balanced",
        "left_alone",
        "stayed",
        "off",
        "decode",
    }
    assert [part["part"] for part in bare_report["parts"]] == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_part(bare_report: dict[str, Any], name: str) -> None:
    part = next(part for part in bare_report["parts"] if part["part"] == name)
    assert "error" not in part, bare_report["output"]
    failed = [row for row in part["rows"] if not row["passed"]]
    assert not failed, bare_report["output"]
    assert [row["what"] for row in part["rows"]] == ROWS[name]


@pytest.mark.parametrize("name", CHECKS)
def test_kernels(reports: list[dict[str, Any]], name: str) -> None:
    checks = reports[1:]
    rows = [row for report in checks for row in report["parts"][0]["rows"]]
    mine = [row for row in rows if row["what"].split("[")[0] in (name, name.split("::")[0])]
    failed = [f"{row['what']}\n{row['error']}" for row in mine if not row["passed"]]
    assert not failed, "\n".join(failed)
    assert mine, "\n".join(report["output"] for report in checks)


def test_simulated_layers_are_balanced_and_their_outputs_compared(
    bare_report: dict[str, Any],
) -> None:
    parts = bare_report["parts"]
    layers = [part["rows"][0] for part in parts if part["part"].startswith("layer")]
    assert len(layers) == 4
    for row in layers:
        assert row["replicas"] > 0
        assert row["imbalance_after"] < row["imbalance_before"]
        assert 0 < row["largest_error_off"] < 0.02
        assert row["largest_difference"] < 0.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    done = run()
    assert done.returncode != 0
    assert "--dry-run" in done.stderr
