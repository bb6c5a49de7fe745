"""How ranks reach each other's GPU memory; twin of ``ultraep_serve.balance.host.fabric``.

Every rank owns signals (its inbox of rows and the flags of its slots' chunks) and a slot pool. Each
maps everybody's in its domain, ranks that NVLink or one host joins, and hands the kernels tables of
addresses. Several ranks may share one device.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.device.exchange import Inboxes, exchange, inbox_bytes, new_epoch
from ultraep_kernels.device.relays import Sends, plan_sends
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.device.stream import Programs, Reach, Stream, StreamSizes

from ultraep_serve.balance.collectives import DeviceAllGather
from ultraep_serve.balance.cuda.driver import host_words
from ultraep_serve.balance.rendezvous import Rendezvous, map_domain, of_group
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.errors import PeerTimeoutError
from ultraep_serve.system.topology import Location

# of a chunk, which one program copies: an expert of 8 MiB then keeps 32 multiprocessors busy
MOST_CHUNK_BYTES = 1 << 18

Number = TypeVar("Number", np.int64, np.float64)

_TIMEOUTS = {
    DeviceStatus.EXCHANGE_TIMEOUT: "the load exchange",
    DeviceStatus.RELAY_TIMEOUT: "a relayed expert",
    DeviceStatus.SLOT_TIMEOUT: "replicated experts",
}


@dataclass(frozen=True)
class Limits:
    """What a rank's signals and launches are made for; the same on every rank."""

    row_width: int  # int32 per exchanged row
    max_chunks: int  # chunks of the largest expert
    patience_ns: int  # how long a wait lasts before it is given up
    programs: Programs


class DeviceFabric:
    """Exchange between all ranks, and streaming between those of one domain.

    The host never waits in ``exchange`` and for what streams do: they launch.
    """

    def __init__(
        self,
        pool: SlotPool,
        rendezvous: Rendezvous,
        location: Location,
        limits: Limits,
        all_gather: DeviceAllGather | None = None,
    ) -> None:
        """Connect to the domain's other ranks; returns when all have arrived.

        All layers have been adopted by ``pool``. ``all_gather`` gathers the rows of all domains
        where there are several. Raises what ``map_domain`` raises.
        """
        self.rank, self.num_ranks, self.domain = location.rank, location.num_ranks, location.domain
        self._all_gather_rows = all_gather
        self.has_several_domains = all_gather is not None
        self.limits, self._driver = limits, pool.driver
        device = pool.driver.device
        self.patience_ns = limits.patience_ns  # of the waits that are launched now
        self.epoch = new_epoch(device)
        self.status = new_status(device)
        # the status of a wait that was given up, which a kernel writes; to be looked at at any time
        self._seen = 0
        self.reported = host_words(1, device)
        self._reported = self.reported.numpy().data  # the same memory, which is looked at sooner
        inbox = inbox_bytes(len(self.domain), limits.row_width)
        with ExitStack() as undo:
            size = inbox + pool.num_slots * limits.max_chunks * 8
            agreed = [limits.row_width, limits.max_chunks, limits.patience_ns, *limits.programs]
            mapped = map_domain(pool, rendezvous, location, size, agreed, undo)
            self.processes = dict(zip(self.domain, mapped.processes, strict=True))  # 0: unseen
            self._inboxes = self._table(mapped.signals)  # (D,) int64 by rank of the domain
            flags = [address + inbox for address in mapped.signals]
            pools, raised = [self._table(of_group(location, at)) for at in (mapped.pools, flags)]
            self.reach = Reach(pools, raised, limits.max_chunks, self.status, self.reported)
            self._undo = undo.pop_all()

    def chunks(self, layer: LayerSlots) -> torch.Tensor:
        """Return a layer's chunks as launches take them, (1 + 4 * C,) int64: how many, then these.

        Make it once, since kernels and graphs keep it.
        """
        assert layer.chunks.shape[0] <= self.limits.max_chunks, "more chunks than flags"
        words = np.concatenate([[len(layer.chunks)], layer.chunks.reshape(-1)])
        return torch.from_numpy(words).to(self._driver.device)

    @property
    def inboxes(self) -> Inboxes:
        """The domain's inboxes, for a launch that exchanges this rank's row of ``row_width`` int32.

        Work after it sees the domain's rows only once every rank of the domain has finished reading
        its slots of the epoch before.
        """
        position = self.rank - self.domain.start
        return Inboxes(self._inboxes, position, self.epoch, self.status)

    def gather(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """Have ``rows`` (R, W) int32 hold all ranks', which with one domain the exchange does."""
        if self._all_gather_rows is not None:
            self._all_gather_rows.gather(row, rows)

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        """All ranks' rows (R, W) int32 for this rank's ``row`` (W,), by a launch of its own."""
        if row.shape != (self.limits.row_width,) or row.dtype != torch.int32:
            raise ValueError(f"{row.shape = } must be ({self.limits.row_width},) int32")
        rows = exchange(row, self.inboxes, self.patience_ns)
        if self.has_several_domains:
            rows = rows.new_empty((self.num_ranks, row.numel()))
            self.gather(row, rows)
        return rows

    def exchange_all(self, words: torch.Tensor) -> torch.Tensor:
        """All ranks' ``words`` (n,) int32, (R, n), in as many exchanges as rows are needed."""
        width = self.limits.row_width
        padded = torch.nn.functional.pad(words, (0, -words.numel() % width)).view(-1, width)
        rows = torch.cat(list(map(self.exchange, padded)), dim=1)
        return rows[:, : words.numel()].contiguous()

    def gathered(self, values: NDArray[Number]) -> NDArray[Number]:
        """All ranks' ``values`` (n,) of 8 bytes each, (R, n), for which the host waits.

        Raises PeerTimeoutError.
        """
        words = torch.from_numpy(values.view(np.int32)).to(self.status.device)
        rows = self.exchange_all(words).cpu()
        self.require_peers()
        return rows.numpy().view(values.dtype)

    def stream(
        self,
        slot_expert: torch.Tensor,
        num_masters: int,
        sends: Sends,
        beside: torch.Stream | None = None,
    ) -> Stream:
        """What copies experts by a plan, whose ``slot_expert`` (R, S) and ``sends`` are given.

        Masters are sent in the stream ``beside``.
        """
        num_ranks, num_slots = slot_expert.shape
        sizes = StreamSizes(num_ranks, num_masters, num_slots, self.limits.programs)
        return Stream(sends, slot_expert, self.rank, self.reach, sizes, beside)

    def sends(self, slot_expert: torch.Tensor, num_masters: int, relay: str) -> Sends:
        """What this rank sends for ``slot_expert`` (R, S), planned or not, in this epoch.

        ``relay`` is ``auto``, ``always`` or ``never``.
        """
        sends = plan_sends(slot_expert, num_masters, relay, len(self.domain), self.rank)
        sends.epoch.copy_(self.epoch[:1])
        return sends

    def wait_at_least(self, seconds: float) -> None:
        """Lengthen later waits, where other ranks may have kernels to compile first.

        Times are whole multiples of what ``limits`` say, which is the least: 0 goes back to that.
        """
        patience = self.limits.patience_ns
        self.patience_ns = patience * max(1, -(-round(seconds * 1e9) // patience))

    def check_peers(self, look: bool = True) -> None:
        """Raise PeerTimeoutError if a kernel has written to ``reported``.

        Without ``look`` only if the last call with it raised.
        """
        if look:
            self._seen = self._reported[0]
        if self._seen:
            self._require_ok(self._seen)

    def synchronize(self) -> None:
        """Return when the device has done all it was told. Raises PeerTimeoutError."""
        with self.naming_lost_peers():
            self._driver.synchronize()

    def require_peers(self) -> None:
        """Raise PeerTimeoutError if a wait was given up. Waits for the device."""
        with self.naming_lost_peers():
            self._require_ok(int(self.status.item()))

    @contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Inside, an error of CUDA becomes PeerTimeoutError where a kernel stopped the device."""
        try:
            yield
        except RuntimeError as error:
            if reason := self.lost_peers:
                raise PeerTimeoutError(reason) from error
            raise

    @property
    def lost_peers(self) -> str:
        """Which wait a kernel has said was given up; empty where none was. At any time."""
        return self._reason(self._reported[0])

    def _require_ok(self, status: int) -> None:
        if reason := self._reason(status):
            raise PeerTimeoutError(reason)

    def _reason(self, status: int) -> str:
        late = [what for bit, what in _TIMEOUTS.items() if bit in DeviceStatus(status)]
        if not late:
            return ""
        return (
            f"rank {self.rank} gave up waiting for {' and '.join(late)}; "
            "another rank has died or hangs: restart the engine"
        )

    def close(self) -> None:
        """Unmap everybody's memory, after the device has finished; tables are invalid then."""
        self._driver.synchronize()
        self._undo.close()

    def _table(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._driver.device)
