"""What ranks find out together at start: which hosts they are on, and that nothing differs.

Version and settings must be alike, and what belongs to no single expert: a copied expert takes its
own tensors along and finds the rest at its target, where another scale would make it compute
something else than its master does.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from ultraep_serve import __version__
from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import EngineGroup, all_gather_rows, gather_bytes
from ultraep_serve.errors import ConfigError, UnsupportedError
from ultraep_serve.system.topology import Location, host_identity, locate
from ultraep_serve.telemetry.run_directory import SHARED_MEMORY

if TYPE_CHECKING:  # needs pydantic, which a bare GPU machine may lack
    from ultraep_serve.config import BalanceConfig


@dataclass(frozen=True)
class SharedValues:
    """The tensors and numbers of one layer that belong to no single expert."""

    layer_name: str
    names: Sequence[str]
    digest: int  # int64
    remedy: str  # what to use where ranks differ

    @classmethod
    def of(
        cls, layer_name: str, values: Iterable[tuple[str, torch.Tensor | float]], remedy: str
    ) -> "SharedValues":
        """Digest the names, types, shapes and bytes of ``values``."""
        names, digest = [], blake2b(digest_size=8)
        for name, value in values:
            names.append(name)
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        number = int.from_bytes(digest.digest(), "little", signed=True)
        return cls(layer_name, names, number, remedy)


@contextmanager
def unanimous(group: EngineGroup, config: "BalanceConfig") -> Iterator[None]:
    """Where one rank raises UnsupportedError inside, all ranks of ``group`` raise it at the end.

    All of them go through it together, or they would wait for one that serves plainly. A rank's own
    reason comes first, then the lowest rank's. Raises PeerTimeoutError when one does not come.
    """
    own = None
    try:
        yield
    except UnsupportedError as error:
        own = error
    reason = json.dumps([own.problem, own.otherwise] if own else []).encode()
    ranks = gather_bytes(group.on_host, reason, config.timeout_seconds * CONNECT_FACTOR)
    for rank, told in enumerate(map(json.loads, ranks)):
        if told and own is None:
            own = UnsupportedError(f"rank {rank}: {told[0]}", otherwise=told[1])
    if own is not None:
        raise own


def require_agreement(
    layers: Sequence[SharedValues], group: dist.ProcessGroup, config: "BalanceConfig"
) -> None:
    """Raise UnsupportedError, on all ranks alike, where ranks differ.

    ``layers`` has this rank's values of every layer. All ranks of ``group`` call it together.
    Raises PeerTimeoutError when one does not come.
    """
    own = np.array([layer.digest for layer in layers], dtype=np.int64)
    everywhere = all_gather_rows(group, own, config.timeout_seconds * CONNECT_FACTOR)
    for layer, of_ranks in zip(layers, everywhere.T, strict=True):
        if (of_ranks != of_ranks[0]).any():
            raise UnsupportedError(
                f"{layer.layer_name}: ranks differ in what holds for all their experts, so a copy "
                f"elsewhere would compute with other values; it is one of "
                f"{', '.join(layer.names)}; use {layer.remedy}"
            )


def find_location(config: "BalanceConfig", rank: int, group: EngineGroup) -> Location:
    """Find where ``rank`` of ``group`` is; all ranks together.

    Raises UnsupportedError where ranks and hosts form no domains, ConfigError where hosts run
    different versions or were given different flags, PeerTimeoutError when a rank does not come.
    """
    own = {
        "version": __version__,
        "host": host_identity(SHARED_MEMORY),
        "name": os.uname().nodename,
        "settings": config.model_dump(mode="json", exclude={"sidecar"}),
    }
    seconds = config.timeout_seconds * CONNECT_FACTOR
    rows = gather_bytes(group.on_host, json.dumps(own).encode(), seconds)
    told = list(map(json.loads, rows))
    for other, each in enumerate(told):
        if each["version"] != told[0]["version"]:
            raise ConfigError(
                f"rank {other} runs another version of ultraep_serve than rank 0 (rank {rank} "
                f"runs {__version__}); install the same one on every host"
            )
    for other, each in enumerate(told):
        for name, value in told[0]["settings"].items():
            if each["settings"][name] != value:
                raise ConfigError(
                    f"rank {other} was started with another {name} than rank 0; start "
                    "all hosts with the same settings"
                )
    hosts = [each["host"] for each in told]
    return locate(rank, hosts, config.domain_size, told[0]["name"])
