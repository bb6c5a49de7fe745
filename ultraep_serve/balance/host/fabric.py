"""How the ranks of one domain reach each other: shared memory, epochs and bounded waits.

Every rank owns signals (its flag, its two rows, its chunk flags) and a slot pool, both anonymous
shared memory that vanishes with its last process, which all map (``balance.rendezvous``). An epoch
is one exchange. All ranks run the same exchanges in the same order, so it is a local counter, and
flags only grow.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from ultraep_kernels.contract import FLAG_BYTES
from ultraep_kernels.host.exchange import gather_rows, post_row, wait_flags
from ultraep_kernels.host.stream import Reach, stream_chunks

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import all_gather_rows
from ultraep_serve.balance.rendezvous import SocketRendezvous, map_domain, of_group
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.balance.watch import WATCH_SECONDS
from ultraep_serve.errors import FabricError, PeerTimeoutError
from ultraep_serve.system.topology import Location, is_process_alive, process_namespace

_SPINS = 20_000  # looks at a flag before the core is offered to others, some tens of microseconds
_PATIENT_SECONDS = 2e-3  # waiting for longer than this sleeps instead of looking on
_NAP_SECONDS = 5e-5
_LIVENESS_SECONDS = 0.05  # between two looks at whether the other processes still exist


class HostFabric:
    """Exchange between all ranks, and streaming between those of one domain."""

    def __init__(
        self,
        run_path: Path,
        location: Location,
        row_width: int,
        pool: SlotPool,
        max_chunks: int,
        timeout_seconds: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Find the domain's other ranks in ``run_path``; returns when all have arrived.

        ``row_width`` int64 per exchanged row; ``max_chunks`` chunks of the largest expert.
        ``group`` of all ranks, which gathers the rows of all domains where there are several.
        Raises PeerTimeoutError when a rank does not come, FabricError when it differs.
        """
        self.rank, self.num_ranks = location.rank, location.num_ranks
        self.domain = location.domain
        self._group = group
        self.epoch = 0
        self._timeout_seconds = self._patience_seconds = timeout_seconds
        self.row_width = row_width
        chunk_flags = FLAG_BYTES + 2 * row_width * 8
        signal_bytes = chunk_flags + pool.num_slots * max_chunks * 8
        rendezvous = SocketRendezvous(
            run_path, self.rank, self.domain, timeout_seconds * CONNECT_FACTOR
        )
        with ExitStack() as undo:
            limits = [row_width, max_chunks]
            mapped = map_domain(pool, rendezvous, location, signal_bytes, limits, undo)
            self._undo = undo.pop_all()
        if 0 in mapped.processes or not process_namespace():
            raise FabricError(
                f"rank {self.rank} cannot see the other ranks' processes; the ranks of a domain "
                "must run in one process namespace, with its own /proc mounted"
            )
        self._processes = mapped.processes  # of the domain's ranks
        self._flags = np.array(mapped.signals, dtype=np.int64)
        self._rows = self._flags + FLAG_BYTES
        flags = of_group(location, (self._flags + chunk_flags).tolist())
        pools = of_group(location, mapped.pools)
        self._reach = Reach(np.array(pools), np.array(flags), max_chunks)
        self._exchange_inside(np.zeros(row_width, dtype=np.int64))  # all have mapped all

    def wait_at_least(self, seconds: float) -> None:
        """Lengthen later waits, where other ranks may have to compile first.

        The least is the timeout: 0 goes back to that.
        """
        self._patience_seconds = max(seconds, self._timeout_seconds)

    def exchange(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """All ranks' rows (R, W) int64 for this rank's ``row`` (W,), W at most ``row_width``.

        Returns only after every rank of the domain has finished reading its replica slots of the
        epoch before.
        """
        rows = self._exchange_inside(row)
        if self._group is None:
            return rows
        # Where a host is lost, the watch speaks first: it knows which one.
        return all_gather_rows(self._group, row, self._patience_seconds + WATCH_SECONDS)

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
        of_plan = parents, slot_expert, num_masters, layer.chunks
        push = partial(stream_chunks, *of_plan, self._reach, self.rank, self.epoch, progress)
        self._wait(push, "a relayed expert")

    def wait_slots(self, layer: LayerSlots, slot_expert: NDArray[np.int32]) -> None:
        """Return when this rank's filled slots, ``slot_expert`` (R, S), have all arrived."""
        slots = np.flatnonzero(slot_expert[self.rank] >= 0)
        if slots.size:
            chunk = np.arange(layer.chunks.shape[0])
            offsets = (slots[:, None] * self._reach.max_chunks + chunk) * 8
            flags = self._reach.flags[self.rank] + offsets.reshape(-1)
            self._wait(lambda spins: self._arrived(flags, spins), "replicated experts")

    def close(self) -> None:
        self._undo.close()

    def _arrived(self, flags: NDArray[np.int64], spins: int) -> bool:
        return bool(wait_flags(flags, self.epoch, spins) == flags.size)

    def _wait(self, is_done: Callable[[int], bool], what: str) -> None:
        """Return once ``is_done(polls)``, which makes so many polls, is true.

        Looks on for some microseconds, then lets others have the core between looks, then naps:
        where ranks outnumber cores, the one waited for needs this one's. Raises PeerTimeoutError,
        about ``what``, where waiting longer cannot help: a rank died, or time is over.
        """
        if is_done(_SPINS):
            return
        now = started = time.monotonic()
        next_liveness = started + _LIVENESS_SECONDS
        while True:
            if now - started < _PATIENT_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
            now = time.monotonic()
            if is_done(_SPINS if now - started < _PATIENT_SECONDS else 1):
                return
            if now >= next_liveness:
                self._require_peers(is_done, what, now - started)
                next_liveness = now + _LIVENESS_SECONDS

    def _require_peers(self, is_done: Callable[[int], bool], what: str, waited: float) -> None:
        ranks = list(zip(self.domain, self._processes, strict=True))
        behind = [
            rank
            for rank, flag in zip(ranks, self._flags, strict=True)
            if not wait_flags(np.array([flag]), self.epoch, 1)
        ]
        dead = [rank for rank in behind or ranks if not is_process_alive(rank[1])]
        timed_out = waited > self._patience_seconds
        if not (dead or timed_out) or is_done(1):  # it may have answered before it ended
            return
        named = ", ".join(str(rank) for rank, _ in dead or behind)
        culprit = f"rank {named}" if named else "another rank"
        reason = "has died" if dead else f"did not answer within {self._patience_seconds:g} s"
        raise PeerTimeoutError(
            f"rank {self.rank} waits for {what}: {culprit} {reason}; restart the engine"
        )
