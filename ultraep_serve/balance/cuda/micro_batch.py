"""What one of the parts of a batch that overlap has for itself: slots, buffers and launches.

Without overlap there is one. The next micro-batch may be routed while experts of this one are
computed or on their way, so whatever that needs must not be shared.
"""

import torch
from ultraep_kernels.contract import HEADER_WIDTH, Prices
from ultraep_kernels.device.count import Count, RowWanted
from ultraep_kernels.device.identity import Identity
from ultraep_kernels.device.plan import Gate, Given, Planner, Rows, Sender, plan_sizes

from ultraep_serve.balance.backend import GroupSetup, row_width
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.pages import LayerRow
from ultraep_serve.balance.physical import forced_ids
from ultraep_serve.types import Decision, TokenView


class MicroBatch:
    """The launches of its layers, one after the other, and what they write to."""

    def __init__(
        self,
        number: int,
        setup: GroupSetup,
        fabric: DeviceFabric,
        choice: torch.Tensor,
        gate: Gate,
        min_saved: int,
        prices: Prices,
    ) -> None:
        """``choice`` (3,) of this rank, on the device; ``gate`` to ``prices`` of plans."""
        shape, device = setup.shape, fabric.status.device
        ranks, experts, slots = shape.num_ranks, shape.num_logical_experts, shape.num_replica_slots
        is_own = setup.view is TokenView.OWN
        width, speeds = row_width(experts, setup.view), setup.speeds
        rows = torch.zeros((ranks, width), dtype=torch.int32, device=device)
        # what the exchange brings is the domain's, which may be all ranks
        arriving = torch.zeros_like(rows) if fabric.has_several_domains else rows
        # tokens that all ranks see count as rank 0's, so that every rank splits them alike
        shared = torch.zeros((ranks, experts + 1), dtype=torch.int32, device=device)
        wanted = RowWanted(choice, fabric.inboxes, arriving)
        total = None if is_own else shared[0]
        self.rows, self._source_rank = rows, setup.source_rank
        self.count = Count(experts, device, wanted, total, has_load=is_own)
        self.plan = Planner(
            plan_sizes(
                *(ranks, experts, slots, setup.location.domain_size),
                *(number, shape.num_micro_batches),
                keeps=setup.config.slot_memory == "per_layer",
                measures_speeds=speeds is None,
                writes_identity=False,
            ),
            Given(
                Rows.of(rows[:, HEADER_WIDTH:] if is_own else shared[:, :experts]),
                fabric.status,
                Rows.of(rows),
                None if speeds is None else torch.from_numpy(speeds).to(device, torch.int32),
                gate,
            ),
            Sender(setup.source_rank, fabric.rank, setup.relay, fabric.epoch, min_saved),
            fabric.reach,
            fabric.limits.programs,
            prices,
        )
        found = self.plan.found
        self.side = SideStream(device)
        self._streams = fabric.stream(
            found.copied, shape.num_masters, found.sends, self.side.stream
        )
        self.identity = Identity(experts, shape.num_masters, shape.num_slots)
        self._has_slots = slots > 0
        self._rooms: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._room = torch.empty(0, device=device)  # of the layers that run, for ids that it fits
        self._fits: tuple[torch.Size, torch.dtype] | None = None
        self._sent: torch.Tensor | None = None  # chunks of the layer that is on its way
        self.row: LayerRow | None = None  # of the layer that was routed and is not computed yet

    def room(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Where physical ids of ``topk_ids`` (T, K) go, of every layer with as many.

        What there was for other sizes stays: graphs that were captured with it may be replayed.
        """
        fits = topk_ids.shape, topk_ids.dtype
        if fits != self._fits:
            self._fits, number = fits, topk_ids.numel()
            self.count.fit(topk_ids)
            kind = 1 << max(0, number - 1).bit_length(), topk_ids.dtype
            if kind not in self._rooms:
                self._rooms[kind] = topk_ids.new_empty(kind[0])
            self._room = self._rooms[kind][:number].view(topk_ids.shape)
        return self._room

    def force(self, topk_ids: torch.Tensor, physical: torch.Tensor, table: torch.Tensor) -> None:
        """Overwrite ``physical`` where it was decided to force an even load.

        ``table`` as ``identity_table`` has it.
        """
        first = self.rows[: self._source_rank, HEADER_WIDTH:].sum()
        forced = forced_ids(topk_ids, table, self.plan.speeds, first).to(physical.dtype)
        is_forced = self.plan.found.decision == Decision.FORCED
        physical.copy_(torch.where(is_forced, forced, physical))

    def send(self, chunks: torch.Tensor) -> None:
        """Send experts of the layer with ``chunks`` beside what the engine does meanwhile."""
        if self._has_slots:
            with self.side:
                self._streams.send(chunks)
        self._sent = chunks

    def receive(self, patience_ns: int) -> None:
        """Have the current stream wait for what was sent beside it and for what others send."""
        if self._sent is not None:
            self.side.join()
            chunks, self._sent = self._sent, None
            self._streams.receive(chunks, patience_ns)


class SideStream:
    """A stream beside the engine's, from each ``with`` to the next ``join``; on a host in order.

    It has a higher priority, so that what runs beside it does not keep it from running. Streams and
    events of torch.cuda itself ask for the current stream in Python, ten microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.Stream | None = None
        self._has_forked = False
        if device.type == "cuda":
            self.stream = torch.Stream(device, priority=-1)
            self._forked, self._done = torch.Event(device), torch.Event(device)

    def __enter__(self) -> None:
        """What is launched in ``stream`` from here on comes behind the current stream."""
        if self.stream is not None:
            self._forked.record()
            self._forked.wait(self.stream)
            self._has_forked = True

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self._done.record(self.stream)

    def join(self) -> None:
        """Have the current stream wait for what was launched, if anything was."""
        if self._has_forked:
            self._has_forked = False
            self._done.wait()
