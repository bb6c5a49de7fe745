"""Sums over the ranks of a host, through memory that they share, rounded once.

Where every rank has all tokens, each computes a part of every token's output, in float32. An
engine's own sum would carry float32 to every rank and leave the rounding to each of them. Here each
rank adds up and rounds a share of the tokens, and the others copy what came of it.

Ranks meet before they add up, and again before they copy: hence a rank writes its next part when
all have added, and its next share when all have copied. Few tokens are left to the engine, whose
own sum meets once, and in C++.
"""

import mmap
import os
from itertools import pairwise, starmap

import numpy as np
import torch
import torch.distributed as dist
from ultraep_kernels.host.combine import MOST_THREADS, add_parts
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
from ultraep_serve.balance.topology import host_identity
from ultraep_serve.errors import ConfigError, FabricError
from ultraep_serve.telemetry.run_directory import SHARED_MEMORY

__all__ = ["HostSums"]

_FEW_TOKENS = 64  # that are left to the engine
_AT_ONCE = 1 << 16  # numbers that torch adds, few enough to be in the cache until they are rounded
_FLAG = mmap.PAGESIZE // 4  # of the numbers of a segment, those before its parts


class HostSums:
    """Adds up float32 parts (T, H) of all ranks. They call it alike, with the same T."""

    def __init__(
        self,
        peers: Peers,
        segments: torch.Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        seconds: float,
    ) -> None:
        """``segments`` (R, W) float32 of all ranks, for ``shape`` (T, H) of tokens at most.

        ``peers`` are waited for ``seconds`` once loading has ended.
        """
        self._most_tokens, self._hidden_size = shape
        self._peers, self._dtype, self._seconds = peers, dtype, seconds
        self._segments = segments
        self._flags = np.array([own.data_ptr() for own in segments], np.int64)
        self._epoch = 0
        begin = _FLAG + shape.numel()
        self._shares = [own[begin:].view(dtype)[: shape.numel()].view(shape) for own in segments]

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, shape: torch.Size, dtype: torch.dtype, seconds: float
    ) -> "HostSums | None":
        """Join all ranks of ``group`` for at most ``shape`` (T, H) of tokens in ``dtype``.

        None, on all ranks alike, where they do not share memory. Until ``end_loading`` they are
        waited for a multiple of the timeout ``seconds``. Raises PeerTimeoutError.
        """
        patience = seconds * CONNECT_FACTOR
        ranks = HostAllGather(group, patience)
        size = 4 * _FLAG + shape.numel() * (4 + dtype.itemsize)
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
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
        sums.total(0)  # compiled before a batch
        return sums

    def end_loading(self) -> None:
        """Expect others to answer within the timeout; before this they may be compiling."""
        self._peers.seconds = self._seconds

    def takes(self, num_tokens: int) -> bool:
        """Whether so many tokens are added up here; others are left to the engine."""
        return _FEW_TOKENS < num_tokens <= self._most_tokens

    def part(self, num_tokens: int) -> torch.Tensor:
        """Where this rank's part (T, H) of the next ``total`` belongs; it holds anything."""
        part = self._segments[self._peers.rank, _FLAG : _FLAG + num_tokens * self._hidden_size]
        return part.view(num_tokens, self._hidden_size)

    def total(self, num_tokens: int) -> torch.Tensor:
        """The sum (T, H) of all ranks' parts, rounded. Raises PeerTimeoutError."""
        total = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype)
        self._meet()
        ends = [num_tokens * rank // len(self._shares) for rank in range(1 + len(self._shares))]
        tokens = list(starmap(slice, pairwise(ends)))
        mine = tokens[self._peers.rank]
        first = _FLAG + mine.start * self._hidden_size
        self._add(first, total[mine], self._shares[self._peers.rank][mine])
        self._meet()
        for some, share in zip(tokens, self._shares, strict=True):
            if some is not mine:
                total[some] = share[some]
        return total

    def _add(self, first: int, total: torch.Tensor, copy: torch.Tensor) -> None:
        """Sums of segments from number ``first`` on, rounded, in ``total`` and ``copy`` (n, H)."""
        total, copy = total.view(-1), copy.view(-1)
        if total.dtype is torch.bfloat16 and torch.get_num_threads() <= MOST_THREADS:
            add_parts(self._segments, first, total, copy)
            return
        for start in range(0, total.numel(), _AT_ONCE):
            rounded = total[start : start + _AT_ONCE]
            begin = first + start
            parts = self._segments[:, begin : begin + rounded.numel()]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole + part
            copy[start : start + _AT_ONCE] = rounded.copy_(whole)

    def _meet(self) -> None:
        """Return when all ranks have come as far."""
        self._epoch += 1
        post_flag(int(self._flags[self._peers.rank]), self._epoch)
        self._peers.wait(self._have_come, "a part of a layer's output", self._flags, self._epoch)

    def _have_come(self, spins: int) -> bool:
        return bool(wait_flags(self._flags, self._epoch, spins) == self._flags.size)


def _map(memory: list[tuple[int, int]], size: int) -> torch.Tensor | None:
    """Segments (R, W) float32 one behind the other, of these processes and descriptors.

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
    return tensor_at(base, size * len(memory), torch.float32).view(len(memory), -1)
