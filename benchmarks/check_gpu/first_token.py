"""Time to first token of vLLM on two ranks that have half of one GPU's multiprocessors each.

first_token.py FOUND

NVIDIA's MPS (``nvidia-cuda-mps-control``) divides the GPU, so that both ranks run at once. The
experts are large, so that they take longer than the engine's collectives, which go through sockets
here. Policies take turns, ``ideal`` among them: what would be if every rank had the same to do.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "device")]

import torch  # noqa: E402
from processes import CANNOT_RUN  # noqa: E402
from report import Report  # noqa: E402
from servers import FLAGS, GpuServer, logged  # noqa: E402

from ultraep_lab.bench.prefill import PrefillOptions  # noqa: E402
from ultraep_lab.demo.balanced_server import measure_server  # noqa: E402
from ultraep_lab.demo.models import make_model  # noqa: E402
from ultraep_lab.demo.spec import ModelSpec  # noqa: E402
from ultraep_serve.types import Policy  # noqa: E402

MPS = "nvidia-cuda-mps-control"
SPEC = replace(
    ModelSpec(), hidden_size=1024, moe_intermediate_size=8192, experts_per_token=8, head_dim=128
)
OPTIONS = PrefillOptions(
    prompt_tokens=(8192,), policies=(Policy.OFF, Policy.QUOTA, Policy.IDEAL), repeats=9
)


def main() -> None:
    """One row."""
    if torch.cuda.device_count() == 1 and shutil.which(MPS) is None:
        print(f"no {MPS}: two ranks would take turns on the GPU")
        sys.exit(CANNOT_RUN)
    report = Report(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"), SPEC)
        report.run("vllm, time to first token", measure, model, Path(folder))
    sys.exit(not report.all_passed)


def measure(model: Path, folder: Path) -> dict[str, Any]:
    """Medians, and ratios within each round."""
    long = ["--max-model-len", "8704", "--max-num-batched-tokens", "8704"]
    flags, log = [*FLAGS["vllm"], *long, "--enforce-eager", "--allow-ideal"], folder / "log"
    with divided(folder), logged(log), GpuServer(model, flags, log) as server:
        document = measure_server(server, OPTIONS, "benchmarks/check_gpu")
    return {"imbalance": document["balance"]["imbalance"], **document["rows"][0]}


@contextmanager
def divided(folder: Path) -> Iterator[None]:
    """Inside, processes that are started share one GPU, half of it for each."""
    if torch.cuda.device_count() > 1:
        yield
        return
    os.environ |= {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipes"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "logs"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
    }
    subprocess.run([MPS, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([MPS], input="quit\n", text=True, check=False)


if __name__ == "__main__":
    main()
