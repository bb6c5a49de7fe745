"""Entry point of the ``torch.backends`` group, which torch calls in every process that imports it.

Engines can be told which plugins to load (``VLLM_PLUGINS``, ``SGLANG_PLUGINS``). Where that leaves
this one out, none of it runs in the engine, which would serve unbalanced in silence. So a process
that was asked to balance looks here, when it imports torch. torch calls nobody where
``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0; a server that the launcher starts was looked at before.
"""

import argparse
import json
import sys
import warnings

from ultraep_serve.system.environment import engine_variable

PLUGIN = "ultraep_serve"  # its name among an engine's plugins
SETTING = "ultraep"  # its name in vLLM's --additional-config
_FILTERS = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}


def check() -> None:
    """Raise SystemExit where balancing was asked for and the engine is told not to load it.

    In a program that imports torch before its engine, if it ever imports one, this only warns. What
    a program says in ``LLM(additional_config=...)`` cannot be known here.
    """
    problems = {engine: problem for engine in _FILTERS if (problem := left_out(engine))}
    if not problems or not _is_asked_for():
        return
    for engine, problem in problems.items():
        if engine in sys.modules:
            raise SystemExit(f"ultraep: error: {problem}")
    if not any(engine in sys.modules for engine in _FILTERS):
        for engine, problem in problems.items():
            warnings.warn(f"ultraep: {engine} would not balance here: {problem}", stacklevel=2)


def left_out(engine: str) -> str | None:
    """Why ``engine`` ("vllm" or "sglang") does not load this plugin, if its user said so.

    vLLM takes names as they stand, and none from an empty filter; SGLang strips them, and takes an
    empty filter for none.
    """
    named = engine_variable(_FILTERS[engine])
    if named is None or (engine == "sglang" and not named):
        return None
    names = named.split(",")
    if PLUGIN in (map(str.strip, names) if engine == "sglang" else names):
        return None
    return f"{_FILTERS[engine]} = {named!r} leaves {PLUGIN} out; add it, or unset the variable"


def setting_on_command_line(arguments: list[str]) -> object:
    """What vLLM's command line says under ``SETTING``; None where it does not say, or not so."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--additional-config", "--additional_config", nargs="?")
    given = parser.parse_known_args(arguments)[0].additional_config
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return None  # vLLM says what is wrong with it
    return found.get(SETTING) if isinstance(found, dict) else None


def _is_asked_for() -> bool:
    from ultraep_serve.config import BalanceConfig

    if setting_on_command_line(sys.orig_argv) is not None:
        return True
    dotted = f"--additional-config.{SETTING}"  # vLLM's other way to write JSON
    if any(argument.replace("_", "-").startswith(dotted) for argument in sys.orig_argv):
        return True
    return BalanceConfig.from_environment() is not None
