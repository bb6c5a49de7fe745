"""How the ranks of a run find each other: which host each is on, and a run directory per host.

The primary rank of each host makes the run directory, and starts the sidecar beside it where that
is asked for.
"""

import logging
import os
import secrets
import zlib
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep_serve import __version__
from ultraep_serve.balance.backend import CONNECT_FACTOR, GroupSetup
from ultraep_serve.balance.collectives import EngineGroup, HostAllGather
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.process import repeated_at_exit
from ultraep_serve.errors import ConfigError, FabricError, UltraEPError, UnsupportedError
from ultraep_serve.launcher.sidecar import start_beside_rank
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.topology import ONLY_STAGE, Location, PipelineStage, host_identity, locate
from ultraep_serve.telemetry.run_directory import SHARED_MEMORY, RunDirectory, name_of_run
from ultraep_serve.telemetry.run_files import RunFiles

__all__ = [
    "find_location",
    "meet",
    "refuse_or_serve_plainly",
    "wait_for_all",
]

_OF_ONE_HOST = ("run_dir", "sidecar")  # settings that may differ from host to host
_made: list[RunDirectory] = []  # by this process
_NAME_BYTES = 64  # as long as Linux lets a host's name be


def find_location(
    config: BalanceConfig, rank: int, num_ranks: int, group: EngineGroup | None
) -> Location:
    """Find where ``rank`` is; all ranks together. Without ``group`` all of them share this host.

    Raises UnsupportedError where ranks and hosts form no domains, ConfigError where hosts run
    different versions or were given different flags, PeerTimeoutError when a rank does not come.
    """
    if group is None:
        return locate(rank, [0] * num_ranks, config.domain_size, os.uname().nodename)
    ranks = HostAllGather(group.on_host, config.timeout_seconds * CONNECT_FACTOR)
    shared = Path(config.run_dir) if config.run_dir else SHARED_MEMORY
    identity = [host_identity(shared), _checksum(__version__)]
    hosts = ranks.gather(np.concatenate([identity, _host_name()]))  # so wide in every version
    if (strangers := np.flatnonzero(hosts[:, 1] != hosts[0, 1])).size:
        raise ConfigError(
            f"rank {strangers[0]} runs another version of ultraep_serve than rank 0 (rank {rank} "
            f"runs {__version__}); install the same one on every host"
        )
    settings = config.model_dump(mode="json", exclude=set(_OF_ONE_HOST))
    rows = ranks.gather(np.array([_checksum(value) for value in settings.values()], np.int64))
    for other, differs in enumerate(rows != rows[0]):
        if differs.any():
            name = list(settings)[int(differs.argmax())]
            raise ConfigError(
                f"rank {other} was started with another {name} than rank 0; start "
                "all hosts with the same settings"
            )
    name = hosts[0, 2:].tobytes().rstrip(b"\0").decode("ascii", "replace")
    return locate(rank, hosts[:, 0].tolist(), config.domain_size, name)


def meet(
    config: BalanceConfig,
    location: Location,
    group: EngineGroup | None,
    pipeline: PipelineStage = ONLY_STAGE,
) -> BalanceConfig:
    """Return ``config`` with a run directory for all ranks of this host; all ranks together.

    Each host's primary rank makes one, which is gone with the host's last rank;
    of several pipeline stages, whichever comes first, for all of them.
    Where it cannot be made, the primary rank raises ConfigError, and the others FabricError.
    """
    if config.run_dir:
        return config
    assert group is not None, "ranks without a group are given a run directory"
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
    ranks = HostAllGather(group.on_host, config.timeout_seconds * CONNECT_FACTOR)
    rows = ranks.gather(np.array([process, number], np.int64))
    process, number = rows[location.host.start].tolist()
    if problem:
        raise ConfigError(problem)
    if not process:
        first = location.host.start
        raise FabricError(f"rank {first} could not make a run directory; its log says why")
    if directory is None:
        directory = RunDirectory.join(name_of_run(process, number))
        _leave_at_exit(directory)
    return config.replace(run_dir=str(directory.path))


def refuse_or_serve_plainly(
    error: UnsupportedError, config: BalanceConfig, logger: logging.Logger, *, is_primary: bool
) -> None:
    """Raise ``error``; where ``on_unsupported`` is off only say it, to the sidecar too."""
    if config.on_unsupported == "error":
        raise error
    logger.warning("ultraep: serving without balancing: %s", error.problem)
    if is_primary:
        _serve_unbalanced(config, error.problem)


def _serve_unbalanced(config: BalanceConfig, reason: str) -> None:
    """Leave ``reason``, why nothing is balanced, where the sidecar finds it; one rank calls this.

    Raises ConfigError where a sidecar that was asked for cannot listen.
    """
    if config.run_dir:
        path = Path(config.run_dir)
    elif _made:  # the ranks had met already
        path = _made[-1].path
    else:
        name = name_of_run(first_process(), secrets.randbits(62))
        path = _make_run_directory(config, name).path
    RunFiles(path).mark_unbalanced(reason)


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
    config = config.replace(run_dir=str(directory.path))
    RunFiles(directory.path).write_config(config.to_json())
    if config.sidecar is not None:
        start_beside_rank(config, config.sidecar)
    return directory


def _leave_at_exit(directory: RunDirectory) -> None:
    """Leave ``directory`` at the end; ``multiprocessing`` does not call ``atexit``."""
    Finalize(None, directory.leave, exitpriority=0)


def wait_for_all(setup: GroupSetup) -> None:
    """Return when all ranks of all domains have come this far; those of one are connected already.

    Raises PeerTimeoutError when a rank does not come.
    """
    group = setup.engine_group
    if group is not None and setup.location.num_domains > 1:
        HostAllGather(group.on_host, setup.connect_seconds).gather(np.zeros(1, np.int64))


def _host_name() -> NDArray[np.int64]:
    name = os.uname().nodename.encode("ascii", "replace")[:_NAME_BYTES]
    return np.frombuffer(name.ljust(_NAME_BYTES, b"\0"), np.int64)


def _checksum(value: object) -> int:
    return zlib.crc32(str(value).encode())
