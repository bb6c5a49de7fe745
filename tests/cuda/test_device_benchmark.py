"""The benchmark for a machine with a GPU runs through, at tiny sizes under the interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "device"
ROWS = {
    "routing": ["plan", "count + reroute"] * 2,
    "layer-qwen3": ["layer of nothing real"],
    "stream": ["stream, relay never", "stream, relay always"],
    "layer-deepseek": ["layer of nothing real"],
    "processes": ["4 processes, direct and relayed", "one of them is killed"],
    "slots": ["slots behind masters"],
    "balancer": ["balancer"],
    "exchange": ["exchange"],
}
MEASURED = ("microseconds", "gigabytes_per", "teraflops", "of_copy", "of_ideal", "speedup", "met")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(FOLDER), *arguments],
        capture_output=True,
        text=True,
        timeout=840,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


def times_in(value: Any, name: str = "") -> list[Any]:
    """Everything below a name that says microseconds, or a rate."""
    if isinstance(value, dict):
        return [t for key, part in value.items() for t in times_in(part, f"{name} {key}")]
    measured = (
        "microseconds",
        "gigabytes_per_second",
        "teraflops",
        "of_copy",
        "of_ideal",
        "speedup",
    )
    return [value] if any(word in name for word in measured) else []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("device") / "dry.json"
    done = run("--dry-run", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(path.read_text()))


def test_dry_run_makes_every_check_in_order(report: dict[str, Any]) -> None:
    assert report["dry_run"]
    assert report["gpu"] is None
    found = {part["part"]: [row["what"] for row in part["rows"]] for part in report["parts"]}
    assert list(found) == list(ROWS)
    assert found == ROWS
    assert all(row["passed"] for part in report["parts"] for row in part["rows"])


def test_dry_run_claims_no_time(report: dict[str, Any]) -> None:
    for part in report["parts"]:
        for row in part["rows"]:
            assumed = row.pop("replicate_over_link_microseconds", None)
            assert (assumed is not None) == part["part"].startswith("layer")
            assert set(times_in(row)) <= {None}, row


def test_simulated_layers_are_balanced_and_their_outputs_compared(report: dict[str, Any]) -> None:
    layers = [part["rows"][0] for part in report["parts"] if part["part"].startswith("layer")]
    for row in layers:
        assert row["replicas"] > 0
        assert row["imbalance_after"] < row["imbalance_before"]
        assert 0 < row["largest_error_off"] < 0.02
        assert row["largest_difference"] < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_check_passes_on_the_gpu(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "device.json"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    done = run()
    assert done.returncode != 0
    assert "--dry-run" in done.stderr


def test_parts_for_which_no_time_was_left_are_failures(tmp_path: Path) -> None:
    path = tmp_path / "late.json"
    done = run("--dry-run", "--seconds", "0", "--part", "slots", "--part", "exchange",
               "--json", str(path))  # fmt: skip
    assert done.returncode == 1
    errors = {part["part"]: part["error"] for part in json.loads(path.read_text())["parts"]}
    assert errors == dict.fromkeys(["slots", "exchange"], "no time was left")


@pytest.fixture
def apart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("apart", FOLDER / "apart.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_a_part_that_hangs_is_killed_with_all_it_started(apart: ModuleType, tmp_path: Path) -> None:
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 600 & echo $! > {child}; wait"]
    assert apart.run_apart(command, 2.0) == "was not done after 2 s"
    stat = Path("/proc", child.read_text().strip(), "stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("its child still runs")


@pytest.mark.parametrize(
    ("command", "error"),
    [("true", ""), ("exit 3", "ended with 3"), ("kill -SEGV $$", "died of SIGSEGV")],
)
def test_how_a_part_ended_is_said(apart: ModuleType, command: str, error: str) -> None:
    assert apart.run_apart(["sh", "-c", command], 60.0) == error
