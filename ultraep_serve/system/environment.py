"""The one place that reads the environment, and what is left there for the processes below.

Any process that imports torch may come by here (``launcher.guard``), so it imports little.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

from ultraep_serve.system.files import checked_token

CONFIG_VARIABLE = "ULTRAEP_CONFIG"
TOKEN_VARIABLE = "ULTRAEP_CONTROL_TOKEN"
_RAY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # vLLM's own
_FIRST_PROCESS_VARIABLE = "ULTRAEP_FIRST_PROCESS"


def config_text() -> str:
    """The settings that this process was given, as JSON or ``@`` and a file; empty: none."""
    return os.environ.get(CONFIG_VARIABLE, "")


def keep_config(text: str) -> None:
    """Leave ``text`` as the settings of this process and of those that it starts."""
    os.environ[CONFIG_VARIABLE] = text


def control_token_from_environment() -> str | None:
    """Bearer token for the sidecar's control endpoint, if the operator chose one.

    Raises ConfigError where it could not be sent as a header.
    """
    return checked_token(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE) or None


def engine_variable(variable: str) -> str | None:
    """What the operator has set the engine's own ``variable`` to; None: nothing."""
    return os.environ.get(variable)


def set_engine_variable(variable: str, value: str | None) -> None:
    """Set the engine's own ``variable`` in this process; None: as if it had not been set."""
    os.environ.pop(variable, None)
    if value is not None:
        os.environ[variable] = value


def claim_first_process() -> None:
    """Have this process be the engine's first one, unless one above it is; to be called at start.

    Who starts engines through ``multiprocessing`` does not call this, and the engine is then no
    worker of its own, whatever that process was started with.
    """
    named = os.environ.get(_FIRST_PROCESS_VARIABLE, "")
    if multiprocessing.parent_process() is None or not (named.isdecimal() and _is_above(named)):
        os.environ[_FIRST_PROCESS_VARIABLE] = str(os.getpid())


def first_process() -> int:
    """Process id of the engine's first process; those that it starts as workers agree."""
    return int(os.environ.get(_FIRST_PROCESS_VARIABLE, os.getpid()))


def _is_above(named: str) -> bool:
    """Whether process ``named`` is this one, or one that it descends from; yes, where unknown."""
    process = str(os.getpid())
    with contextlib.suppress(OSError):
        while process not in (named, "0"):
            stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
            process = stat.rpartition(")")[2].split()[1]
        return process == named
    return True


def share_with_ray_workers() -> None:
    """Have vLLM give its Ray workers, which get little of this environment, our settings too."""
    if CONFIG_VARIABLE in os.environ:
        names = os.environ.get(_RAY_VARIABLE, "").split(",")
        os.environ[_RAY_VARIABLE] = ",".join(filter(None, dict.fromkeys([*names, CONFIG_VARIABLE])))


def child_environment(config: str | None, defaults: Mapping[str, str]) -> dict[str, str]:
    """Environment for an engine with ``config``, as JSON; the operator's wins over ``defaults``.

    ``config`` None: balancing is not switched on, whatever the operator's says.
    """
    environment = {**defaults, **os.environ}
    environment.pop(CONFIG_VARIABLE, None)
    return environment if config is None else {**environment, CONFIG_VARIABLE: config}
