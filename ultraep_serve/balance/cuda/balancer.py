"""The data flow on the device, for which the host does not wait; twin of ``host.balancer``.

Its answers are the same. What the host decides there, kernels decide here: ``DeviceBalancer.route``
only launches, one line per stage, the same for every batch. What came of a layer it learns later,
from copies of the outcome that are done by then (``pages``).
"""

import logging
from typing import Any

import torch
from ultraep_kernels.device.plan import Gate, new_states

from ultraep_serve.balance.backend import (
    GroupSetup,
    LayerBalancer,
    is_capturing,
    marking_failure,
)
from ultraep_serve.balance.cuda.choices import Expectations, OwnChoice
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.micro_batch import MicroBatch
from ultraep_serve.balance.cuda.pages import Batches, Page
from ultraep_serve.balance.own_time import OwnTime
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.records import Records
from ultraep_serve.balance.slots import LayerSlots
from ultraep_serve.costs.model import IntegerCosts, least_saved
from ultraep_serve.plan.residents import prices_of
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, Stage

logger = logging.getLogger(__name__)


class DeviceBalancer(LayerBalancer):
    """Balances the MoE layers of one rank, whose experts are on a GPU.

    Experts are sent in a stream beside the engine's, and awaited in ``receive``; a layer that is
    expected to copy nothing takes one launch in the engine's stream (``choices.Expectations``).
    Records come when the host comes by after the device is done with a batch. ``reroute`` is a part
    of ``plan``, whose launch looks the ids up; ``wait`` is how much longer than the engine's stream
    what runs beside it took.

    All of it may be captured in a CUDA graph, of which nothing is recorded; a replay obeys the
    policy that rank 0 last read in a ``route``.

    Where a wait was given up, the device says so and stops before the layer's experts run: whoever
    reads tokens gets an error of CUDA. A ``route`` after that raises the reason.
    """

    def __init__(
        self,
        setup: GroupSetup,
        layers: list[LayerSlots],
        fabric: DeviceFabric,
        policies: ControlPage | None,
        recorder: Recorder,
        costs: IntegerCosts,
        samples: Any = None,
    ) -> None:
        """Take what ``HostBalancer`` takes; ``samples`` are of ``proof.device``."""
        self._setup, self._fabric, self._recorder = setup, fabric, recorder
        self._samples = samples
        shape, device = setup.shape, fabric.status.device
        own_time = OwnTime(costs, shape.num_masters)
        expert_bytes = [layer.bytes_per_expert for layer in layers]
        self._records = Records(setup, expert_bytes, recorder, own_time)
        self._choice, self._expected = OwnChoice(policies, own_time, device), Expectations()
        most, numbers = round(setup.config.max_imbalance * 10**6), range(shape.num_micro_batches)
        gate = Gate(most, costs.per_assignment, costs.per_expert_read, costs.per_expert_sent)
        given = setup, fabric, self._choice.on_device, gate, least_saved(costs)
        prices = prices_of(costs, shape)
        self._parts = [MicroBatch(number, *given, prices) for number in numbers]
        self._chunks = [fabric.chunks(layer) for layer in layers]
        self._sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        # of copies that stay, by micro-batch and layer
        self._states: list[list[torch.Tensor | None]] = [[None] * len(layers) for _ in numbers]
        if self._parts[0].plan.sizes.keeps:
            held = *self._sizes[:2], shape.num_replica_slots
            self._states = [list(new_states(len(layers), *held, device)) for _ in numbers]
        self._identity = torch.from_numpy(identity_table(*self._sizes)).to(device)
        self._batches = Batches(device, self._sizes, len(layers) * shape.num_micro_batches)
        self._captured = Page(device, self._sizes, 0)  # of layers that go into a CUDA graph
        self._number = 0  # of the batch that runs
        self._page: Page | None = None  # its own, once it has exchanged
        self._is_captured = False  # whether it goes into a CUDA graph
        self._has_waited = False

    @marking_failure
    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        """Physical ids (T, K) for ``topk_ids``, on the device and int32 or int64 like these.

        The next layer's ids are written to the same memory. Micro-batches come in the same order in
        every layer, on every rank, and have ``batch_tokens`` of their own. Raises PeerTimeoutError
        when a rank is gone, batches later; then for every micro-batch of a layer, because their
        threads wait for each other.
        """
        self._fabric.check_peers(look=micro_batch == 0)
        is_small = batch_tokens < self._setup.config.min_batch_tokens
        if layer == 0 and micro_batch == 0:
            self._begin(is_small, is_capturing(topk_ids))
        part, ids = self._parts[micro_batch], topk_ids.contiguous()
        physical = part.room(ids)
        if is_small or (self._page is not None and self._expected.rests):
            part.identity(ids, physical)
            return physical
        begins = self._page is None
        page = self._page = self._page or self._begin_exchanging()
        row = part.row = page.open(layer, batch_tokens, micro_batch)
        part.count(ids, self._fabric.patience_ns)
        self._fabric.gather(part.count.row, part.rows)
        row.lap(Stage.EXCHANGE)
        self._plan(part, layer, ids, physical)
        if self._samples is not None and page is not self._captured:
            found = part.plan.found
            self._samples.routed(layer, topk_ids, physical, found, micro_batch, begins)
        return physical

    def _plan(
        self, part: MicroBatch, layer: int, ids: torch.Tensor, physical: torch.Tensor
    ) -> None:
        """Plan the layer, write ``physical`` ids, and send experts where a plan is followed."""
        row, chunks = part.row, self._chunks[layer]
        assert row is not None, "nothing has been counted"
        state = self._states[row.micro_batch][layer]
        planned = ids, physical, part.count, row.outcome, state
        if self._expected.copies_nothing(layer, row.micro_batch):
            part.plan(*planned, (chunks, self._fabric.patience_ns))
            row.lap(Stage.PLAN)
        else:
            part.plan(*planned)
            row.lap(Stage.PLAN)
            part.send(chunks)
        if self._setup.config.allow_ideal:
            part.force(ids, physical, self._identity)

    def receive(self, micro_batch: int = 0) -> None:
        part = self._parts[micro_batch]
        row = part.row
        if row is not None:
            row.lap(Stage.COMPUTE)  # the engine's dispatch is a part of it
            part.receive(self._fabric.patience_ns)
            row.lap(Stage.WAIT)
            row.begin_experts()

    def experts_done(self, micro_batch: int = 0) -> None:
        row = self._parts[micro_batch].row
        # the time of one micro-batch's experts may hold another one's
        if row is not None and len(self._parts) == 1:
            row.end_experts()

    @marking_failure
    def computed(self, micro_batch: int = 0) -> None:
        part, page = self._parts[micro_batch], self._page
        row, part.row = part.row, None
        if row is not None and page is not None and page is not self._captured:
            row.lap(Stage.COMPUTE)
            is_last = self._expected.rests or row.layer == len(self._chunks) - 1
            if is_last and all(other.row is None for other in self._parts):
                self._batches.send(page)
            if self._samples is not None and self._samples.computed(micro_batch):
                self._choice.forget()
        if self._batches.unread and not self._is_captured:
            self._record_what_is_done()

    @property
    def is_waiting(self) -> bool:
        page = self._batches.last
        return page.used > 0 and not (page.is_sent and page.is_done)

    def warm_up(self) -> None:
        """Compile every kernel, by routing nothing but padding; all ranks together."""
        page = Page(self._fabric.status.device, self._sizes, 0)
        for dtype in torch.int32, torch.int64:  # routers give either
            ids = torch.full((2, 1), -1, dtype=dtype, device=self._fabric.status.device)
            for number, part in enumerate(self._parts):
                physical, part.row = part.room(ids), page.open(0, 0, number)
                part.identity(ids, physical)
                for self._expected.rests in False, True:
                    part.count(ids, self._fabric.patience_ns)
                    self._fabric.gather(part.count.row, part.rows)
                    self._plan(part, 0, ids, physical)
                    part.receive(self._fabric.patience_ns)
                part.row = None
        self._expected.rests = False
        self._fabric.require_peers()

    def forget(self) -> None:
        if self._parts[0].plan.sizes.keeps:
            self._fabric.synchronize()  # of batches until now none may take it for its own
            self._choice.forget()
            self._fabric.synchronize()  # whatever stream the next one is launched in

    def _begin(self, is_small: bool, is_captured: bool) -> None:
        """Begin a batch. Layers that one before has left open go to the host as they are.

        While a graph is captured nothing of earlier batches may be launched or asked of the device.
        """
        self._page, self._is_captured = None, is_captured
        self._number += 1
        self._choice.write()
        if is_captured:
            return
        before = self._batches.last
        if before.used and not before.is_sent:
            self._batches.send(before)
        if is_small:
            self._recorder.count_batch(Decision.SMALL)

    def _begin_exchanging(self) -> Page:
        """Say what this rank would have, and learn of the batch before last what to expect.

        Waits for the device where the host is more than two batches ahead of it.
        """
        self._choice.send()
        if self._is_captured:
            return self._captured
        before = self._batches.before_last
        with self._fabric.naming_lost_peers():
            if not before.is_done:
                if not self._has_waited:
                    logger.info("the host launches more than two batches ahead, and waits")
                self._has_waited = True
                before.wait()
        self._expected.learn(before.rows, before.outcome)
        self._record_what_is_done(until=before)
        return self._batches.next(self._number)

    def _record_what_is_done(self, until: Page | None = None) -> None:
        """Record batches that the device has done, at least those up to ``until``."""
        with self._fabric.naming_lost_peers():
            for page in self._batches.done(until=until):
                layers, tokens = [row.layer for row in page.rows], [row.tokens for row in page.rows]
                times = self._batches.stage_times(page), [row.experts_ns for row in page.rows]
                self._records.write(page.number, layers, tokens, page.outcome, *times)
