"""What all experts of a rank share must be the same on all ranks; knows no engine.

A copied expert takes its own tensors along and finds the rest at its target: a scale that a rank
took from its own experts would make it compute something else there than its master does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import HostAllGather
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError

__all__ = ["SharedValues", "require_agreement"]

_REFUSED = 0  # instead of a digest


@dataclass(frozen=True)
class SharedValues:
    """The tensors and numbers of one layer that belong to no single expert."""

    layer_name: str
    names: Sequence[str]
    digest: int  # int64, not 0
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
        return cls(layer_name, names, number or 1, remedy)


def require_agreement(
    layers: Sequence[SharedValues | UnsupportedError],
    group: dist.ProcessGroup,
    config: BalanceConfig,
) -> None:
    """Raise UnsupportedError, on all ranks alike, where ranks differ or one has refused a layer.

    ``layers`` has this rank's values, or why a layer cannot be balanced, of every layer. All ranks
    of ``group`` call it together. Raises PeerTimeoutError when one does not come.
    """
    own = [layer.digest if isinstance(layer, SharedValues) else _REFUSED for layer in layers]
    ranks = HostAllGather(group, config.timeout_seconds * CONNECT_FACTOR)
    everywhere = ranks.gather(np.array(own, dtype=np.int64))
    for index, layer in enumerate(layers):
        if isinstance(layer, UnsupportedError):
            raise layer
        of_ranks = everywhere[:, index]
        if (refused := np.flatnonzero(of_ranks == _REFUSED)).size:
            raise UnsupportedError(
                f"rank {refused[0]} cannot balance {layer.layer_name}; see its log for the reason"
            )
        if (of_ranks != of_ranks[0]).any():
            raise UnsupportedError(
                f"{layer.layer_name}: ranks differ in what holds for all their experts, so a copy "
                f"elsewhere would compute with other values; it is one of "
                f"{', '.join(layer.names)}; use {layer.remedy}"
            )
