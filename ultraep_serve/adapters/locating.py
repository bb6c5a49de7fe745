"""Where this rank stands among all ranks, found out once when the model is loaded."""

import os
import zlib
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from ultraep_serve import __version__
from ultraep_serve.config import BalanceConfig
from ultraep_serve.crossing import EngineGroup, HostCrossing
from ultraep_serve.domains import Location, host_identity, locate
from ultraep_serve.errors import ConfigError

__all__ = ["find_location", "wait_for_all"]

_LOADING_FACTOR = 20  # loading a model takes longer than a batch
_OF_ONE_HOST = ("run_dir",)  # settings that may differ from host to host
_NAME_BYTES = 64  # as long as Linux lets a host's name be


def find_location(
    config: BalanceConfig, rank: int, num_ranks: int, group: EngineGroup | None
) -> Location:
    """Where ``rank`` stands; all ranks together. Without ``group`` all of them share this host.

    Raises UnsupportedError where ranks and hosts form no domains, ConfigError where hosts run
    different versions or were given different flags, PeerTimeoutError when a rank does not come.
    """
    if group is None:
        return locate(rank, [0] * num_ranks, config.domain_size, os.uname().nodename)
    crossing = _patient(config, group)
    identity = [host_identity(config.run_path), _checksum(__version__)]
    hosts = crossing.gather(np.concatenate([identity, _host_name()]))  # so wide in every version
    if (strangers := np.flatnonzero(hosts[:, 1] != hosts[0, 1])).size:
        raise ConfigError(
            f"rank {strangers[0]} runs another version of ultraep_serve than rank 0 (rank {rank} "
            f"runs {__version__}); install the same one on every host"
        )
    settings = {key: value for key, value in asdict(config).items() if key not in _OF_ONE_HOST}
    rows = crossing.gather(np.array([_checksum(value) for value in settings.values()], np.int64))
    for other, differs in enumerate(rows != rows[0]):
        if differs.any():
            name = list(settings)[int(differs.argmax())]
            raise ConfigError(
                f"rank {other} was started with another {name} than rank 0; start "
                "ultraep-serve with the same flags on every host"
            )
    name = hosts[0, 2:].tobytes().rstrip(b"\0").decode("ascii", "replace")
    return locate(rank, hosts[:, 0].tolist(), config.domain_size, name)


def wait_for_all(config: BalanceConfig, location: Location, group: EngineGroup | None) -> None:
    """Return when all ranks of all domains have come this far; those of one have met already.

    Raises PeerTimeoutError when a rank does not come.
    """
    if group is not None and location.num_domains > 1:
        _patient(config, group).gather(np.zeros(1, np.int64))


def _patient(config: BalanceConfig, group: EngineGroup) -> HostCrossing:
    return HostCrossing(group.on_host, config.timeout_seconds * _LOADING_FACTOR)


def _host_name() -> NDArray[np.int64]:
    name = os.uname().nodename.encode("ascii", "replace")[:_NAME_BYTES]
    return np.frombuffer(name.ljust(_NAME_BYTES, b"\0"), np.int64)


def _checksum(value: object) -> int:
    return zlib.crc32(str(value).encode())
