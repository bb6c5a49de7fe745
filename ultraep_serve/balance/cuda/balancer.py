"""The data flow on the device, for which the host does not wait; twin of ``host.balancer``.

Its answers are the same. What the host decides there, kernels decide here: the host only launches,
the same for every batch, so that any of it can be captured in a CUDA graph. What came of a layer it
learns later, from copies of the outcome that are done by then (``recording``).
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED, HEADER_WIDTH
from ultraep_kernels.device.count import CountBuffers, blocks_of, count, new_count_buffers
from ultraep_kernels.device.identity import Identity
from ultraep_kernels.device.launch import Changing, Launches
from ultraep_kernels.device.outcome import outcome_width
from ultraep_kernels.device.plan import (
    DevicePlan,
    FollowUp,
    Gate,
    PlanBuffers,
    Sender,
    new_plan_buffers,
    plan,
)
from ultraep_kernels.device.reroute import new_physical
from ultraep_kernels.device.speeds import choose_speeds

from ultraep_serve.balance.backend import (
    GroupSetup,
    LayerSlots,
    PolicySource,
    marking_failure,
    row_width,
)
from ultraep_serve.balance.cuda.arrival import Arrival, side_stream
from ultraep_serve.balance.cuda.choices import Expectations, OwnChoice
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.recording import (
    UNTIMED,
    Entry,
    LayerTimer,
    PendingBatches,
    PendingLayer,
    is_capturing,
)
from ultraep_serve.balance.cuda.records import Records
from ultraep_serve.balance.physical import forced_ids, identity_table
from ultraep_serve.balance.speeds import ExpertClock, OwnTime, fixed_speeds
from ultraep_serve.costs.model import IntegerCosts, least_saved
from ultraep_serve.errors import ConfigError
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, Stage, TokenView

if TYPE_CHECKING:
    from ultraep_serve.config import BalanceConfig

__all__ = ["DeviceBalancer", "DeviceSamples"]

logger = logging.getLogger(__name__)

_ALL = -1  # layers
_ID_TYPES = torch.int32, torch.int64  # routers give either
_CHANGING = "ids_ptr", "outcome_ptr", "num_ids", "before_ptr", "out_ptr"  # arguments


class DeviceSamples(Protocol):
    """What checks some of the layers; see ``proof.device``."""

    def routed(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        physical: torch.Tensor,
        plan: DevicePlan,
        micro_batch: int,
        begins: bool,
    ) -> None:
        """Take note of a layer in which ranks have exchanged, the first of its batch or not."""

    def computed(self, micro_batch: int) -> None:
        """Check the layer that was launched."""


class DeviceBalancer:
    """Balances the MoE layers of one rank. All ranks must call ``route`` in the same order.

    While the policy is off at run time, loads are exchanged in a batch's first layer only, from
    which all ranks know it; the others are left at home by the device. Where the batch before last
    was off, the host launches no more than the identity for them, whatever the first one says.

    Experts are sent in a stream beside the engine's, which dispatches meanwhile and joins it in
    ``receive``. There they are awaited too. In a CUDA graph it is one stream. A layer that was left
    alone in the batch before last takes one launch for its plan and for all that may follow, in the
    engine's stream.

    Records come when the host comes by after the device is done with a batch, at a later ``route``
    or ``computed``.
    Stages are timed in one batch of several; what the others took is taken from it, by their
    tokens. ``reroute`` is a part of ``plan``, whose launch looks the ids up. What runs beside the
    engine's stream is not timed: ``wait`` is how much longer it took.
    Nothing is recorded while a CUDA graph is captured, nor when one is replayed; a replay obeys the
    policy that rank 0 last read in a ``route``.

    Where a wait was given up, the device says so and stops before the layer's experts run: nobody
    computes with what is not there, and whoever reads tokens gets an error of CUDA instead. A
    ``route`` after the device has said so raises the reason.
    """

    def __init__(
        self,
        setup: GroupSetup,
        layers: list[LayerSlots],
        fabric: DeviceFabric,
        policies: PolicySource | None,
        recorder: Recorder,
        costs: IntegerCosts | None = None,
        samples: DeviceSamples | None = None,
    ) -> None:
        """Take what ``HostBalancer`` takes."""
        config, shape = setup.config, setup.shape
        self._config, self._shape, self._view = config, shape, setup.view
        self._relay = setup.relay
        self._source_rank, self._domain_size = setup.source_rank, setup.location.domain_size
        self._fabric = fabric
        self._recorder, self._samples = recorder, samples
        self._gate, self._min_saved = _gate_of(config, costs), least_saved(costs)
        self._tables = [fabric.tables(layer) for layer in layers]
        experts, ranks, slots = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        self._device = device = fabric.status.device
        self._identity = torch.from_numpy(identity_table(experts, ranks, slots)).to(device)
        self._configured = _on_device(fixed_speeds(config.speeds, ranks), device)
        self._agreed = torch.full((ranks,), FULL_SPEED, dtype=torch.int32, device=device)
        self._speeds = self._agreed.clone()  # of the batch that runs
        own_time = OwnTime(costs, shape.num_masters)
        self._choice = OwnChoice(policies, own_time, device)
        # tokens that all ranks see count as rank 0's, so that every rank splits them alike
        self._shared = torch.zeros((ranks, experts + 1), dtype=torch.int32, device=device)
        is_own = setup.view is TokenView.OWN
        self._counts = new_count_buffers(
            0, experts, device, None if is_own else self._shared[0], has_load=is_own
        )
        self._counts_of: dict[int, CountBuffers] = {}  # as many ids; graphs keep them
        width = row_width(experts, setup.view)
        self._rows = torch.zeros((ranks, width), dtype=torch.int32, device=device)  # of the domain
        several = fabric.has_several_domains
        self._gathered = torch.zeros_like(self._rows) if several else self._rows  # of all ranks
        # what came of the layer before
        self._decision = torch.zeros(1, dtype=torch.int32, device=device)
        num_values = outcome_width(experts, ranks, slots)
        self._spare_outcome = torch.zeros(num_values, dtype=torch.int32, device=device)
        numbers = range(shape.num_micro_batches)
        self._plans = [self._new_plan_buffers(number) for number in numbers]
        self._arriving = [Arrival(side_stream(device)) for _ in numbers]
        self._steps: dict[tuple[int, int, bool, torch.dtype], _Steps] = {}
        self._changing = [Changing(*_CHANGING) for _ in numbers]
        self._sizes = experts, shape.num_masters, slots
        self._identities = {
            (dtype, number): Identity(*self._sizes) for dtype in _ID_TYPES for number in numbers
        }
        self._rooms = [self._identity for _ in numbers]  # for physical ids
        self._told = [_Told(self._identity, self._counts, 0) for _ in numbers]
        self._pending = PendingBatches(device, num_values, len(layers), shape.num_micro_batches)
        self._has_waited = False
        expert_bytes = [layer.bytes_per_expert for layer in layers]
        self._records = Records(setup, expert_bytes, recorder, own_time)
        self._expected = Expectations()
        self._has_begun = False  # whether the batch that runs has exchanged
        self._capturing = False  # whether what was routed last goes into a CUDA graph
        self._batch = 0

    def _new_plan_buffers(self, micro_batch: int) -> PlanBuffers:
        """Each micro-batch has slots of its own: another one's may still be read.

        Its own are free: the exchange followed its expert kernel.
        """
        shape = self._shape
        return new_plan_buffers(
            shape.num_ranks,
            shape.num_logical_experts,
            shape.num_replica_slots,
            self._device,
            domain_size=self._domain_size,
            first_slot=micro_batch * shape.num_replica_slots,
            all_slots=shape.num_slots,
            decision=self._decision,
        )

    @marking_failure
    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        """Physical ids (T, K) on the device for logical ``topk_ids`` (T, K), padding -1 kept.

        Both are int32 or int64. The next layer's ids are written to the same memory.

        ``layer`` counts MoE layers from 0 in the order they run, ``batch_tokens`` is the batch's
        token count over all ranks. Micro-batches of a batch may overlap: number 1 is routed before
        the engine has computed number 0. They come in the same order in every layer, on every rank,
        and have ``batch_tokens`` of their own. Raises PeerTimeoutError when a rank is gone, batches
        later; then for every micro-batch of a layer, because their threads wait for each other.
        Raises ConfigError in the capture of a graph, where so many ids were never routed before.
        """
        self._fabric.check_peers(look=micro_batch == 0)
        begins = layer == 0 and micro_batch == 0
        is_small = batch_tokens < self._config.min_batch_tokens
        self._capturing = capturing = is_capturing(topk_ids)
        if is_small and not begins:
            return self._stay(topk_ids, micro_batch)
        if begins:
            self._batch += not capturing
            self._has_begun = False
            self._choice.write()
        if begins and not capturing:
            self._pending.begin(self._batch)
        if is_small:
            if not capturing:
                self._pending.skip(Decision.SMALL)
                self._record_what_is_done()
            return self._stay(topk_ids, micro_batch)
        if self._has_begun and self._expected.rests and not capturing:
            return self._stay(topk_ids, micro_batch)
        begins, self._has_begun = not self._has_begun, True
        if begins:
            self._choice.send()
            if not capturing:
                self._look_back()
        pending = None
        if not capturing:
            pending = self._pending.open(layer, batch_tokens, micro_batch)
            if pending is None:
                self._recorder.count_lost()
        physical = self._balance(layer, topk_ids, pending, micro_batch, begins)
        if self._samples is not None and not capturing:
            found = self._plans[micro_batch].found
            self._samples.routed(layer, topk_ids, physical, found, micro_batch, begins)
        # the time of one micro-batch's experts may hold another one's
        if pending is not None and self._shape.num_micro_batches == 1:
            self._arriving[micro_batch].timer = pending
        return physical

    def receive(self, micro_batch: int = 0) -> ExpertClock:
        """Order what is launched next behind all experts that were sent and received."""
        return self._arriving[micro_batch].join()

    @property
    def is_waiting(self) -> bool:
        return self._pending.is_waiting

    @marking_failure
    def computed(self, micro_batch: int = 0) -> None:
        """Take note that the engine has launched the layer that was routed last."""
        if self._pending.is_idle or self._capturing:  # as in most layers of decode
            return
        self._pending.close(micro_batch, is_last=self._expected.rests)
        if self._samples is not None:
            self._samples.computed(micro_batch)
        self._record_what_is_done()

    def identity(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Send each assignment to its master, (T, K) as given; padding and unknown ids give -1."""
        return Identity(*self._sizes)(topk_ids, new_physical(topk_ids))

    def _stay(self, topk_ids: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """``identity``, in the memory and by the launch of the layers before."""
        send_home = self._identities[topk_ids.dtype, micro_batch]
        return send_home(topk_ids, self._room(topk_ids, micro_batch))

    def _room(self, topk_ids: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """One for all layers, as new memory takes longer than a launch; a graph has its own."""
        if self._capturing:
            return new_physical(topk_ids)
        room = self._rooms[micro_batch]
        if room.shape != topk_ids.shape or room.dtype != topk_ids.dtype:
            room = self._rooms[micro_batch] = new_physical(topk_ids)
        return room

    def warm_up(self) -> None:
        """Compile every kernel, by routing nothing but padding; all ranks together."""
        unlike = {tables.chunks.shape[0]: layer for layer, tables in enumerate(self._tables)}
        numbers = range(self._shape.num_micro_batches)
        places = [(layer, number) for layer in unlike.values() for number in numbers]
        for dtype in _ID_TYPES:
            padding = torch.full((2, 1), -1, dtype=dtype, device=self._device)
            self._stay(padding, 0)
            for expected in ([], places):
                self._expected.left_alone = set(expected)
                for layer, micro_batch in places:
                    self._balance(layer, padding, None, micro_batch, True)
                    self._arriving[micro_batch].join()
        self._expected.left_alone = set()
        self._fabric.require_peers()

    def end_loading(self) -> None:
        """Expect others to answer within the timeout; before this they may be compiling."""
        self._fabric.wait_at_least(0)
        self._steps.clear()  # they were made with longer waits

    def _balance(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        pending: PendingLayer | None,
        micro_batch: int,
        begins: bool,
    ) -> torch.Tensor:
        watch: LayerTimer = pending or UNTIMED
        kind = micro_batch, begins, topk_ids.dtype
        steps, common = self._steps_of(layer, *kind), self._steps_of(_ALL, *kind)
        found = self._plans[micro_batch].found
        outcome = self._spare_outcome if pending is None else pending.on_device
        ids, physical = topk_ids.contiguous(), self._room(topk_ids, micro_batch)
        told = self._told[micro_batch]
        if told.physical is not physical:
            told = self._tell(micro_batch, physical)
        buffers, blocks = told.buffers, told.blocks
        self._changing[micro_batch].set(ids.data_ptr(), outcome.data_ptr())
        common.count.make(lambda: self._count(ids, buffers, begins), blocks)
        self._fabric.gather(buffers.counted.row, self._gathered)
        if begins:  # the speeds of a new batch follow from the rows
            common.choose.make(self._choose_speeds)
        watch.lap(Stage.EXCHANGE)
        left_alone = self._leaves_alone(layer, micro_batch)
        step = steps.plan_and_copy if left_alone else common.plan

        def plan_layer() -> None:
            copies = self._fabric.copies(self._tables[layer]) if left_alone else None
            follow_up = FollowUp(ids, buffers.counted, physical, copies)
            self._plan(outcome, micro_batch, begins, follow_up)

        step.make(plan_layer, blocks)
        watch.lap(Stage.PLAN)
        if not left_alone:
            self._send(layer, steps, found, self._arriving[micro_batch])
        return self._forced(ids, physical, found) if self._config.allow_ideal else physical

    def _tell(self, micro_batch: int, physical: torch.Tensor) -> "_Told":
        """Tell launches where ids, as many as ``physical``, are counted and looked up from now."""
        number = physical.numel()
        told = _Told(physical, self._buffers_of(number), blocks_of(number))
        where = told.buffers.counted.before.data_ptr(), physical.data_ptr()
        self._changing[micro_batch].set(0, 0, number, *where)  # the first ones are of layers
        self._told[micro_batch] = told
        return told

    def _send(self, layer: int, steps: "_Steps", found: DevicePlan, arriving: Arrival) -> None:
        """Send experts beside what the engine does until it launches its own; received there."""
        _, num_masters, num_slots = self._sizes
        sent = self._tables[layer], found.slot_expert, num_masters, found.sends

        def stream() -> None:
            # by then the next micro-batch may have exchanged and decided
            self._fabric.stream(*sent, epoch=found.sends.epoch)

        if num_slots and self._capturing:
            stream()
        elif num_slots:
            arriving.side.launch(steps.replicate, stream)
        arriving.expect(lambda: steps.receive.make(lambda: self._fabric.receive(*sent)))

    def _look_back(self) -> None:
        """Learn of the batch before last what to expect, and record what is left of older ones.

        Waits for the device where the host is more than two batches ahead of it.
        """
        before = self._pending.before_last
        with self._fabric.naming_lost_peers():
            if not before.is_done:
                if not self._has_waited:
                    logger.info("the host launches more than two batches ahead, and waits")
                self._has_waited = True
                before.wait()
        self._expected.learn(before)
        self._write(self._pending.make_room())

    def _leaves_alone(self, layer: int, micro_batch: int) -> bool:
        """Whether the device is expected to leave the layer alone.

        Then one launch plans and does all that may follow. Where it turns out otherwise that is all
        done, but experts are sent before dispatch, not beside it. Ranks must expect the same: one
        whose experts come before its dispatch waits for others' side streams, which their own
        dispatch, waiting for it, should not keep from running.
        """
        return self._expected.rests or (layer, micro_batch) in self._expected.left_alone

    def _steps_of(self, layer: int, micro_batch: int, begins: bool, dtype: torch.dtype) -> "_Steps":
        """Return the launches of an earlier layer with the same arguments, to be repeated."""
        key = layer, micro_batch, begins, dtype
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = _Steps(self._changing[micro_batch])
        return steps

    def _buffers_of(self, number: int) -> CountBuffers:
        """For so many ids. A graph that is captured would own new ones, and set them to 0 anew."""
        size = 1 << max(0, number - 1).bit_length()
        buffers = self._counts_of.get(size)
        if buffers is None:
            if self._capturing:
                raise ConfigError(f"route {size} ids once before a CUDA graph of it is captured")
            buffers = self._counts_of[size] = self._counts.holding(size)
        return buffers

    def _count(self, topk_ids: torch.Tensor, buffers: CountBuffers, begins: bool) -> None:
        count(
            topk_ids,
            self._shape.num_logical_experts,
            choice=self._choice.on_device,
            buffers=buffers,
            decision=self._decision,
            begins=begins,
            inboxes=self._fabric.inboxes,
            rows=self._rows,
            patience_ns=self._fabric.patience_ns,
        )

    def _choose_speeds(self) -> None:
        choose_speeds(self._gathered, self._configured, self._agreed, self._speeds)

    def _plan(
        self, outcome: torch.Tensor, micro_batch: int, begins: bool, follow_up: FollowUp
    ) -> None:
        is_own, experts = self._view is TokenView.OWN, self._shape.num_logical_experts
        rows = self._gathered
        plan(
            rows[:, HEADER_WIDTH:] if is_own else self._shared[:, :experts],
            self._shape.num_replica_slots,
            self._source_rank,
            self._fabric.status,
            domain_size=self._domain_size,
            gate=self._gate,
            rows=rows,
            speeds=self._speeds,
            sender=Sender(self._fabric.rank, self._relay, self._fabric.epoch, self._min_saved),
            outcome=outcome,
            buffers=self._plans[micro_batch],
            begins=begins,
            follow_up=follow_up,
        )

    def _forced(
        self, topk_ids: torch.Tensor, physical: torch.Tensor, found: DevicePlan
    ) -> torch.Tensor:
        """``physical``, or what the decision to force an even load makes of it."""
        first = self._gathered[: self._source_rank, HEADER_WIDTH:].sum()
        forced = forced_ids(topk_ids, self._identity, self._speeds, first).to(physical.dtype)
        return torch.where(found.decision == Decision.FORCED, forced, physical)

    def _record_what_is_done(self) -> None:
        if not self._pending.has_sent:
            return
        with self._fabric.naming_lost_peers():
            self._write(self._pending.drain())

    def _write(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Decision):
                self._recorder.count_batch(entry)
            else:
                self._records.write(entry)


class _Told(NamedTuple):
    """What launches know of the ids of a batch, the same in all of its layers."""

    physical: torch.Tensor
    buffers: CountBuffers
    blocks: int


class _Steps:
    """The launches of a layer, by stage, or those that are the same in all layers."""

    def __init__(self, changing: Changing) -> None:
        self.count, self.plan, self.plan_and_copy = (Launches(changing) for _ in range(3))
        self.choose, self.replicate, self.receive = (Launches() for _ in range(3))


def _on_device(speeds: NDArray[np.int64] | None, device: torch.device) -> torch.Tensor | None:
    return None if speeds is None else torch.from_numpy(speeds).to(device, torch.int32)


def _gate_of(config: "BalanceConfig", costs: IntegerCosts | None) -> Gate:
    if costs is None:
        return Gate(config.max_imbalance)
    return Gate(
        max_imbalance=config.max_imbalance,
        per_assignment=costs.per_assignment,
        per_expert_read=costs.per_expert_read,
        per_expert_sent=costs.per_expert_sent,
    )
