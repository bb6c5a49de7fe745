"""The benchmark for a machine with a GPU runs through, at tiny sizes under the interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device.py"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_dry_run_checks_every_kernel_and_claims_no_time(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    path = tmp_path / "dry.json"
    done = run("--dry-run", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["dry_run"]
    assert report["versions"]["device"] is None
    assert {row["what"] for row in report["rows"]} == {
        "plan",
        "count + reroute",
        "exchange",
        "stream, relay never",
        "stream, relay always",
        "balancer",
    }
    assert all(row["microseconds"] is None for row in report["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    done = run()
    assert done.returncode != 0
    assert "--dry-run" in done.stderr
