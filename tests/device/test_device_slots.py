"""The script that checks slots and fabric on a GPU: here what it does without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_slots.py"
CHECKS = [
    "slots behind masters",
    "2 processes on one device, relays never",
    "4 processes on one device, relays always",
    "a process dies",
]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("--dry-run", id="host memory"),
        pytest.param(
            "",
            id="GPU",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ),
    ],
)
def test_every_check_passes(tmp_path: Path, where: str) -> None:
    path = tmp_path / "device_slots.json"
    done = run(*([where] if where else []), "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["dry_run"] == bool(where)
    assert [check["what"] for check in report["checks"]] == CHECKS
    assert all(check["passed"] for check in report["checks"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
