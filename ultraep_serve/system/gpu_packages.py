"""Packages of engines on GPUs that fail late, or in silence, where they are too old or missing."""

import re
from typing import NamedTuple

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.environment import engine_variable
from ultraep_serve.system.versions import installed_version


class Unfit(NamedTuple):
    """A package, what it leads to, what to do, and whether no balanced server starts with it."""

    name: str
    seen: str
    remedy: str
    stops: bool


def unfit_packages(module: str) -> list[Unfit]:
    """For the engine ``module`` ("vllm" or "sglang"), from package metadata alone."""
    found = []
    if _is_older(triton := installed_version("triton"), (3, 7)):
        seen = f"Triton {triton} does not compile the kernels of balancing"
        found.append(Unfit("triton", seen, "pip install 'triton>=3.7'", True))
    if module != "vllm":
        return found
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        nccl = installed_version(name)
        if _is_older(nccl, (2, 29, 7)) and not engine_variable("VLLM_NCCL_SO_PATH"):
            seen = f"vLLM takes no NCCL {nccl}, in silence; data-parallel ranks fail without one"
            found.append(Unfit("nccl", seen, f"pip install '{name}>=2.29.7'", False))
    sampler = engine_variable("VLLM_USE_FLASHINFER_SAMPLER")
    if not installed_version("flashinfer-python") and sampler != "0":
        seen = "vLLM's sampler needs FlashInfer, which is missing"
        remedy = "pip install flashinfer-python, or set VLLM_USE_FLASHINFER_SAMPLER=0"
        found.append(Unfit("flashinfer", seen, remedy, True))
    return found


def require_fit_packages(module: str) -> list[str]:
    """What users are told of such packages. Raises ConfigError for one that stops the server."""
    unfit = unfit_packages(module)
    if stopping := next((each for each in unfit if each.stops), None):
        raise ConfigError(f"{stopping.seen}; {stopping.remedy}")
    return [f"{each.seen}; {each.remedy}" for each in unfit]


def _is_older(version: str | None, oldest: tuple[int, ...]) -> bool:
    return version is not None and tuple(map(int, re.findall(r"\d+", version))) < oldest
