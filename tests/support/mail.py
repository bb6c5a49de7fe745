"""Dispatch and combine for tests: ids and outputs between ranks of one host."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.system.topology import Location

__all__ = ["Mail"]

_WORDS = 4096  # int64 per exchange


class Mail:
    """What an engine's dispatch and combine do, over a second fabric of this host."""

    def __init__(
        self, run_path: Path, rank: int, num_ranks: int, max_ids: int, timeout_seconds: float
    ) -> None:
        """Meet the other ranks in ``run_path``; ``max_ids`` of one rank's batch."""
        self._num_ranks = num_ranks
        self._width = max(_WORDS, -(-max_ids // 2))
        path = run_path / "mail"
        path.mkdir(exist_ok=True)
        pool = SlotPool(HostMemory(), 0, chunk_bytes=4096)
        self._fabric = HostFabric(
            path, Location.on_one_host(rank, num_ranks), self._width, pool, 0, timeout_seconds
        )

    def all_ids(self, physical: torch.Tensor, sizes: NDArray[np.int64]) -> torch.Tensor:
        """Physical ids (T_all, K) of all sources; this rank's are ``physical``."""
        padded = torch.full((int(sizes.max()), physical.shape[1]), -1, dtype=torch.int32)
        padded[: physical.shape[0]] = physical
        everyone = self._gather(padded)
        return torch.cat([everyone[rank, : int(size)] for rank, size in enumerate(sizes)])

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' float32 parts, in the order of ranks."""
        return self._gather(part.view(torch.int32)).view(torch.float32).sum(dim=0)

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """(R, ...) of everybody's int32 ``values`` (...), of one shape on all ranks."""
        words = values.reshape(-1).numpy()
        row = np.zeros(words.size + words.size % 2, dtype=np.int32)
        row[: words.size] = words
        parts = [
            self._fabric.exchange(row.view(np.int64)[first : first + self._width])
            for first in range(0, row.size // 2, self._width)
        ]
        if not parts:
            return values.expand(self._num_ranks, *values.shape)
        rows = np.ascontiguousarray(np.concatenate(parts, axis=1)).view(np.int32)
        return torch.from_numpy(rows[:, : words.size].copy()).view(-1, *values.shape)
