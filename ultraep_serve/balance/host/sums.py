"""Sums over the ranks of a host, of what their experts gave, in memory that they share.

Where every rank has all tokens, each computes some of a token's experts. An engine's own sum would
carry float32 to every rank and leave the rounding to each of them. Here experts write their rows
where all ranks read them. Each rank adds up and rounds a share of the tokens, and the others copy
what came of it. A token's rows are added in the order of its experts, so that its sum has the same
bits whoever computed them.

Ranks meet before they add up, and again before they copy: hence a rank writes its next rows when
all have added, and its next share when all have copied. Few tokens are left to the engine, whose
own sum meets once, and in C++.
"""

import math
import mmap
import os
from itertools import accumulate, pairwise, starmap

import numpy as np
import torch
import torch.distributed as dist
from ultraep_kernels.host.combine import combine
from ultraep_kernels.host.exchange import post_flag, wait_flags

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import HostAllGather
from ultraep_serve.balance.host.memory import (
    MAP_FIXED,
    READ_WRITE,
    map_memory,
    shareable_memory,
    tensor_at,
)
from ultraep_serve.balance.host.peers import Peers, open_memory_of
from ultraep_serve.errors import ConfigError, FabricError
from ultraep_serve.system.topology import host_identity
from ultraep_serve.telemetry.run_directory import SHARED_MEMORY

__all__ = ["HostSums"]

_FEW_TOKENS = 64  # that are left to the engine


class HostSums:
    """Adds up rows that experts of all ranks gave. Ranks call it alike, with the same tokens."""

    def __init__(
        self,
        peers: Peers,
        segments: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        seconds: float,
    ) -> None:
        """``segments`` (R, B) bytes of all ranks, for ``shape`` (T, K, H) of tokens at most.

        ``peers`` are waited for ``seconds`` once loading has ended.
        """
        num_tokens, top_k, hidden_size = shape
        self._most_tokens, self._top_k = num_tokens, top_k
        self._peers, self._seconds = peers, seconds
        self._flags = np.array([own.data_ptr() for own in segments], np.int64)
        self._epoch = 0
        place, rows, shares, _ = _begins(shape, dtype)
        self._place = segments[:, place:rows].view(torch.int32)
        rows_of_all = segments[:, rows:shares].view(dtype)[:, : shape.numel()]
        self._rows = rows_of_all.view(len(segments), num_tokens * top_k, hidden_size)
        self._shape = torch.Size(())
        self._views = self._place, self._rows
        size = num_tokens * hidden_size
        of_all = segments[:, shares:].view(dtype)[:, :size]
        self._shares = of_all.view(len(segments), num_tokens, hidden_size)

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, shape: torch.Size, dtype: torch.dtype, seconds: float
    ) -> "HostSums | None":
        """Join all ranks of ``group`` for at most ``shape`` (T, K, H) of tokens in ``dtype``.

        None, on all ranks alike, where they do not share memory. Until ``end_loading`` they are
        waited for a multiple of the timeout ``seconds``. Raises PeerTimeoutError.
        """
        patience = seconds * CONNECT_FACTOR
        ranks = HostAllGather(group, patience)
        size = _begins(shape, dtype)[-1]
        try:
            segment = shareable_memory("ultraep-sums")
            os.ftruncate(segment, size)
        except (ConfigError, OSError):
            segment = -1
        own = [host_identity(SHARED_MEMORY), os.getpid(), segment, size]
        hosts, processes, descriptors, sizes = ranks.gather(np.array(own, np.int64)).T.tolist()
        segments = None
        if len(set(hosts)) == len(set(sizes)) == 1 and min(descriptors) >= 0:
            segments = _map(list(zip(processes, descriptors, strict=True)), size)
        have_all = ranks.gather(np.array([segments is not None], np.int64)).all()
        if segment >= 0:
            os.close(segment)
        if segments is None or not have_all:
            return None
        peers = Peers(group.rank(), dict(enumerate(processes)), patience)
        sums = cls(peers, segments, shape, dtype, seconds)
        nothing = torch.Size((0, shape[1]))
        sums.total(nothing)  # compiled before a batch, as what engines add up to the end
        combine(*sums._of_all(nothing), torch.empty(0, shape[2]))
        return sums

    def end_loading(self) -> None:
        """Expect others to answer within the timeout; before this they may be compiling."""
        self._peers.seconds = self._seconds

    def takes(self, shape: torch.Size) -> bool:
        """Whether tokens with assignments ``shape`` (T, K) are added up here, or by the engine."""
        return _FEW_TOKENS < shape[0] <= self._most_tokens and shape[1] <= self._top_k

    def rows(self, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this rank's rows of the next ``total`` belong; both hold anything.

        ``shape`` is (T, K). The place (T, K) int32 of each assignment, -1 for another rank's, in
        rows (T * K, H).
        """
        place, rows = self._of_all(shape)
        return place[self._peers.rank], rows[self._peers.rank]

    def total(self, shape: torch.Size) -> torch.Tensor:
        """The sum (T, H) of all ranks' rows, rounded once. Raises PeerTimeoutError.

        ``shape`` (T, K) is that of the tokens' assignments.
        """
        place, rows = self._of_all(shape)
        total = rows.new_empty(shape[0], rows.shape[2])
        ends = [shape[0] * rank // len(rows) for rank in range(1 + len(rows))]
        tokens = list(starmap(slice, pairwise(ends)))
        mine = tokens[self._peers.rank]
        self._meet()
        combine(place[:, mine], rows, total[mine], self._shares[self._peers.rank][mine])
        self._meet()
        for some, share in zip(tokens, self._shares, strict=True):
            if some is not mine:
                total[some] = share[some]
        return total

    def _of_all(self, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Places (R, T, K) and rows (R, T * K, H) of all ranks."""
        if shape != self._shape:  # that of the layer before
            size = shape.numel()
            place = self._place[:, :size].view(len(self._place), *shape)
            self._shape, self._views = shape, (place, self._rows[:, :size])
        return self._views

    def _meet(self) -> None:
        """Return when all ranks have come as far."""
        self._epoch += 1
        post_flag(int(self._flags[self._peers.rank]), self._epoch)
        self._peers.wait(self._have_come, "rows of a layer's output", self._flags, self._epoch)

    def _have_come(self, spins: int) -> bool:
        return bool(wait_flags(self._flags, self._epoch, spins) == self._flags.size)


def _begins(shape: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    """Where in a segment for ``shape`` (T, K, H) places, rows and shares begin, and its size.

    Segments lie one behind the other, and rows of all a number of rows apart.
    """
    num_tokens, top_k, hidden_size = shape
    row = hidden_size * dtype.itemsize
    sizes = (
        1,  # the flag
        num_tokens * top_k * torch.int32.itemsize,
        num_tokens * top_k * row,
        num_tokens * row,
    )
    begins = list(accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes))
    whole = math.lcm(mmap.PAGESIZE, row)
    return *begins[:-1], -(-begins[-1] // whole) * whole


def _map(memory: list[tuple[int, int]], size: int) -> torch.Tensor | None:
    """Segments (R, B) of bytes one behind the other, of these processes and descriptors.

    None where one of them cannot be mapped.
    """
    room, shared = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | MAP_FIXED
    try:
        base = map_memory(0, size * len(memory), mmap.PROT_READ, room, -1)
        for number, (process, descriptor) in enumerate(memory):
            segment = open_memory_of(process, descriptor)
            try:
                map_memory(base + number * size, size, READ_WRITE, shared, segment)
            finally:
                os.close(segment)
    except (FabricError, OSError):
        return None
    return tensor_at(base, size * len(memory), torch.uint8).view(len(memory), -1)
