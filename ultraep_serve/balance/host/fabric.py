"""How the ranks of one domain reach each other: shared memory, epochs and bounded waits.

Every rank owns a segment (its flag, its two rows, its chunk flags) and a slot pool, both anonymous
shared memory that vanishes with its last process. Ranks find each other's through a handshake
file in the run directory, which names the process and its descriptors.

An epoch is one exchange. All ranks run the same exchanges in the same order, so the epoch is a
local counter, flags only grow, and nothing is ever reset.

Tables are indexed by rank of the whole group, as plans are; other domains' entries are 0, since no
plan moves weights there.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import FLAG_BYTES
from ultraep_kernels.host.exchange import gather_rows, post_row, wait_flags
from ultraep_kernels.host.stream import StreamTables, stream_chunks

from ultraep_serve.balance.backend import CONNECT_FACTOR, LayerSlots
from ultraep_serve.balance.collectives import HostAllGather
from ultraep_serve.balance.host.memory import shareable_memory
from ultraep_serve.balance.host.peers import Peers, open_memory_of
from ultraep_serve.balance.host.slots import HostSlotPool, map_pool, unmap
from ultraep_serve.balance.watch import WATCH_SECONDS
from ultraep_serve.errors import FabricError, PeerTimeoutError
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.run_files import RunFiles

__all__ = ["HostFabric"]


@dataclass(frozen=True)
class _Handshake:
    """What a rank publishes about itself."""

    process: int
    segment: int  # file descriptor
    segment_bytes: int
    pool: int  # file descriptor
    pool_bytes: int
    row_width: int
    num_slots: int
    max_chunks: int

    @property
    def slot_layout(self) -> tuple[int, ...]:
        """What must be the same on every rank."""
        return self.row_width, self.num_slots, self.max_chunks, self.pool_bytes


class HostFabric:
    """Exchange between all ranks, and streaming between those of one domain."""

    def __init__(
        self,
        run_path: Path,
        location: Location,
        row_width: int,
        pool: HostSlotPool,
        max_chunks: int,
        timeout_seconds: float,
        all_gather: HostAllGather | None = None,
    ) -> None:
        """Find the domain's other ranks in ``run_path``; returns when all have arrived.

        ``row_width`` int64 per exchanged row; ``max_chunks`` chunks of the largest expert.
        ``all_gather`` gathers the rows of all domains where there are several.
        Raises PeerTimeoutError when a rank does not come, FabricError when it differs.
        """
        self.rank, self.num_ranks = location.rank, location.num_ranks
        self.domain = location.domain
        self._all_gather_rows = all_gather
        self.epoch = 0
        self._timeout_seconds = timeout_seconds
        self.row_width = row_width
        self._max_chunks = max_chunks
        chunk_flags = FLAG_BYTES + 2 * row_width * 8
        segment_bytes = chunk_flags + pool.num_slots * max_chunks * 8
        segment = shareable_memory("ultraep-fabric")
        os.ftruncate(segment, segment_bytes)
        handshake = _Handshake(
            process=os.getpid(),
            segment=segment,
            segment_bytes=segment_bytes,
            pool=pool.descriptor,
            pool_bytes=pool.size,
            row_width=row_width,
            num_slots=pool.num_slots,
            max_chunks=max_chunks,
        )
        self._mappings: list[tuple[int, int]] = []

        files = RunFiles(run_path)
        path = files.handshake(self.rank)
        path.unlink(missing_ok=True)  # of an earlier run
        files.publish(path, json.dumps(asdict(handshake)).encode())
        self._handshakes = self._rendezvous(files, handshake)
        processes = {rank: other.process for rank, other in self._handshakes.items()}
        self._peers = Peers(self.rank, processes, timeout_seconds)
        segments, pools = self._map_all()
        inside = segments[self.domain.start : self.domain.stop]
        self._flags = inside
        self._rows = inside + FLAG_BYTES
        self._chunk_flags = np.where(segments > 0, segments + chunk_flags, 0)
        self._pools = pools
        self._exchange_inside(np.zeros(row_width, dtype=np.int64))  # all have mapped all
        os.close(segment)
        path.unlink(missing_ok=True)

    def wait_at_least(self, seconds: float) -> None:
        """Lengthen later waits, where other ranks may have to compile first.

        The least is the timeout: 0 goes back to that.
        """
        self._peers.seconds = max(seconds, self._timeout_seconds)

    def exchange(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """All ranks' rows (R, W) int64 for this rank's ``row`` (W,), W at most ``row_width``.

        Returns only after every rank of the domain has finished reading its replica slots of the
        epoch before.
        """
        rows = self._exchange_inside(row)
        if self._all_gather_rows is None:
            return rows
        # Where a host is lost, the watch speaks first: it knows which one.
        return self._all_gather_rows.gather(row, self._peers.seconds + WATCH_SECONDS)

    def gathered(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """All ranks' ``values`` (n,), (R, n), in as many exchanges as rows are needed."""
        parts = range(0, values.size, self.row_width)
        rows = [self.exchange(values[start : start + self.row_width]) for start in parts]
        return np.concatenate(rows, axis=1)

    def _exchange_inside(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """The domain's rows (D, W)."""
        if row.size > self.row_width:
            raise ValueError(f"{row.size} values do not fit into a row of {self.row_width}")
        self.epoch += 1
        padded = row
        if row.size < self.row_width:
            padded = np.zeros(self.row_width, dtype=np.int64)
            padded[: row.size] = row
        position = self.rank - self.domain.start
        post_row(int(self._flags[position]), int(self._rows[position]), self.epoch, padded)
        self._wait(lambda spins: self._arrived(self._flags, spins), "the load exchange")
        return gather_rows(self._rows, self.epoch, self.row_width)[:, : row.size]

    def stream(
        self,
        layer: LayerSlots,
        slot_expert: NDArray[np.int32],
        parents: NDArray[np.int64],
        num_masters: int,
    ) -> None:
        """Push this rank's masters, and forward what it relays, for the plan of this epoch.

        ``slot_expert``, ``parents`` (R, S). Raises PeerTimeoutError when a relay does not deliver.
        """
        progress = np.zeros(slot_expert.shape, dtype=np.int64)
        tables = StreamTables(
            layer.master_addresses,
            self._pools,
            layer.region_offsets,
            layer.expert_bytes,
            layer.chunks,
            self._chunk_flags,
            self._max_chunks,
        )

        def push(spins: int) -> bool:
            return bool(
                stream_chunks(
                    parents,
                    slot_expert,
                    num_masters,
                    tables,
                    self.rank,
                    self.epoch,
                    progress,
                    spins,
                )
            )

        self._wait(push, "a relayed expert")

    def wait_slots(self, layer: LayerSlots, slot_expert: NDArray[np.int32]) -> None:
        """Return when this rank's filled slots, ``slot_expert`` (R, S), have all arrived."""
        slots = np.flatnonzero(slot_expert[self.rank] >= 0)
        if slots.size:
            chunk = np.arange(layer.chunks.shape[0])
            offsets = (slots[:, None] * self._max_chunks + chunk) * 8
            flags = self._chunk_flags[self.rank] + offsets.reshape(-1)
            self._wait(lambda spins: self._arrived(flags, spins), "replicated experts")

    def close(self) -> None:
        """Unmap the other ranks' memory."""
        for address, size in self._mappings:
            unmap(address, size)
        self._mappings.clear()

    def _arrived(self, flags: NDArray[np.int64], spins: int) -> bool:
        return bool(wait_flags(flags, self.epoch, spins) == flags.size)

    def _wait(self, is_done: Callable[[int], bool], what: str) -> None:
        self._peers.wait(is_done, what, self._flags, self.epoch)

    def _rendezvous(self, files: RunFiles, own: _Handshake) -> dict[int, _Handshake]:
        """The handshakes of the domain's ranks, by rank."""
        deadline = time.monotonic() + self._timeout_seconds * CONNECT_FACTOR
        handshakes: dict[int, _Handshake] = {}
        for rank in self.domain:
            path = files.handshake(rank)
            while (found := _published(path)) is None:
                if not files.handshake(self.rank).exists():
                    raise FabricError(
                        f"somebody deletes the files in {files.path} while ranks meet there; start "
                        "the engine again"
                    )
                if time.monotonic() > deadline:
                    raise PeerTimeoutError(
                        f"rank {self.rank} waited for rank {rank} of {self.num_ranks}, which did "
                        "not come; look for its error in the engine's log"
                    )
                time.sleep(0.01)
            handshakes[rank] = found
        for rank, other in handshakes.items():
            if other.slot_layout != own.slot_layout:
                raise FabricError(f"rank {rank} laid out its slots unlike rank {self.rank}")
        return handshakes

    def _map_all(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Addresses of segments and pools (R,), 0 for the ranks of other domains."""
        segments = np.zeros(self.num_ranks, dtype=np.int64)
        pools = np.zeros(self.num_ranks, dtype=np.int64)
        for rank, handshake in self._handshakes.items():
            segments[rank] = self._map(
                handshake.process, handshake.segment, handshake.segment_bytes
            )
            pools[rank] = self._map(handshake.process, handshake.pool, handshake.pool_bytes)
        return segments, pools

    def _map(self, process: int, descriptor: int, size: int) -> int:
        mine = open_memory_of(process, descriptor)
        try:
            address = map_pool(mine, size)
        finally:
            os.close(mine)
        self._mappings.append((address, size))
        return address


def _published(path: Path) -> _Handshake | None:
    try:
        return _Handshake(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
