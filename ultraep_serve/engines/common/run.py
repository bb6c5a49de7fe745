"""A run directory for the ranks of each host, which its primary rank makes.

That rank also starts the sidecar beside it, where one is asked for. A refusal is raised, or the
engine serves plainly and the sidecar is told why.
"""

import logging
import os
import secrets
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import EngineGroup, all_gather_rows
from ultraep_serve.config import BalanceConfig, SidecarSettings
from ultraep_serve.errors import (
    MORE_SHARED_MEMORY,
    ConfigError,
    FabricError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.machine import address_of, why_not_listen
from ultraep_serve.system.refusals import repeated_at_exit
from ultraep_serve.system.topology import ONLY_STAGE, Location, PipelineStage
from ultraep_serve.telemetry.run_directory import RunDirectory, name_of_run
from ultraep_serve.telemetry.run_files import RunFiles

_made: list[RunDirectory] = []  # by this process


def meet(
    config: BalanceConfig,
    location: Location,
    group: EngineGroup,
    pipeline: PipelineStage = ONLY_STAGE,
) -> Path:
    """The run directory of all ranks of this host; all ranks together.

    Each host's primary rank makes one, which is gone with the host's last rank;
    of several pipeline stages, whichever comes first, for all of them.
    Where it cannot be made, the primary rank raises ConfigError, and the others FabricError.
    """
    process, number = first_process(), secrets.randbits(62)
    is_shared = pipeline.num_stages > 1
    if is_shared:
        number = pipeline.run
    directory, problem = None, ""
    if location.is_host_primary:
        try:
            with repeated_at_exit():
                name = name_of_run(process, number)
                directory = _make_run_directory(config, name, or_join=is_shared)
        except (OSError, UltraEPError) as error:  # the others wait for an answer
            process, problem = 0, str(error)
            if not isinstance(error, UltraEPError):
                problem = f"cannot make a run directory ({error.strerror}); {MORE_SHARED_MEMORY}"
    own, seconds = np.array([process, number], np.int64), config.timeout_seconds * CONNECT_FACTOR
    rows = all_gather_rows(group.on_host, own, seconds)
    process, number = rows[location.host.start].tolist()
    if problem:
        raise ConfigError(problem)
    if not process:
        first = location.host.start
        raise FabricError(f"rank {first} could not make a run directory; its log says why")
    if directory is None:
        directory = RunDirectory.join(name_of_run(process, number))
        _leave_at_exit(directory)
    return directory.path


def refuse_or_serve_plainly(
    error: UnsupportedError, config: BalanceConfig, logger: logging.Logger, *, is_primary: bool
) -> None:
    """Raise ``error``; where ``on_unsupported`` is off only say it, to the sidecar too.

    Raises ConfigError where a sidecar that was asked for cannot listen.
    """
    if config.on_unsupported == "error":
        raise error
    logger.warning("ultraep: serving without balancing: %s", error.problem)
    if not is_primary:
        return
    if _made:  # the ranks had met already
        path = _made[-1].path
    else:
        name = name_of_run(first_process(), secrets.randbits(62))
        path = _make_run_directory(config, name).path
    RunFiles(path).mark_unbalanced(error.problem)


def _make_run_directory(config: BalanceConfig, name: str, *, or_join: bool = False) -> RunDirectory:
    """Make a run directory that this process leaves at its end, and the sidecar, if asked for.

    With ``or_join`` another process may have made both.
    """
    try:
        directory = RunDirectory.create(name)
    except ConfigError:
        if not or_join:
            raise
        directory = RunDirectory.join(name)
        _leave_at_exit(directory)
        return directory
    _made.append(directory)
    _leave_at_exit(directory)
    RunFiles(directory.path).write_config(config.to_json())
    if config.sidecar is not None:
        start_beside_rank(directory.path, config.sidecar)
    return directory


def _leave_at_exit(directory: RunDirectory) -> None:
    """Leave ``directory`` at the end; ``multiprocessing`` does not call ``atexit``."""
    Finalize(None, directory.leave, exitpriority=0)


def start_beside_rank(run_path: Path, settings: SidecarSettings) -> None:
    """Start the sidecar of a run directory, which ends with this rank.

    Raises ConfigError where it cannot listen, or where its packages are not installed.
    """
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"the sidecar needs {' and '.join(missing)}; pip install '.[sidecar]' in a checkout"
        )
    port = settings.port_beside()
    if reason := why_not_listen(settings.host, port):
        raise ConfigError(
            f"the sidecar cannot listen on {address_of(settings.host, port)} ({reason}); choose "
            'another with "sidecar": {"port": N}'
        )
    command = [sys.executable, "-m", "ultraep_serve.sidecar", "--run-dir", str(run_path)]
    command += ["--host", settings.host, "--port", str(port), "--parent", str(os.getpid())]
    command += ["--allowed-hosts", settings.allowed_hosts] if settings.allowed_hosts else []
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
