"""The data flow: exact load -> plan -> replicas -> physical ids, for every layer of every batch.

``HostBalancer.route`` is nearly the whole of it, one line per stage, between an engine's router and
its dispatch; ``receive`` waits before its experts. The engine's own dispatch, expert kernels and
combine run on unchanged.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED, HEADER_WIDTH, POLICY, SPEEDS, TIME, Choice
from ultraep_kernels.host.count import count
from ultraep_kernels.host.exchange import contradictions, write_row
from ultraep_kernels.host.relays import relay_parents
from ultraep_kernels.host.reroute import reroute

from ultraep_serve.balance.backend import GroupSetup, LayerSlots, PolicySource, marking_failure
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.physical import forced_ids, identity_table, master_ids
from ultraep_serve.balance.speeds import HostClock, RankSpeeds
from ultraep_serve.costs.model import (
    IntegerCosts,
    Transfer,
    experts_moved,
    least_saved,
    saved_picoseconds,
    transfer_of,
)
from ultraep_serve.errors import ControlError
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.telemetry.record import LayerOutcome, LayerPlace, LayerRecord
from ultraep_serve.telemetry.recorder import Recorder, Stopwatch
from ultraep_serve.types import Decision, Plan, Policy, SpeedSource, Stage, TokenView

__all__ = ["HostBalancer", "HostSamples"]

logger = logging.getLogger(__name__)

_ONE_EXPERT = Transfer(busiest_sender=1, busiest_receiver=1)  # the least a plan can move
_MILLION = 10**6


class HostSamples(Protocol):
    """What checks some of the layers; see ``proof.host``."""

    is_in_doubt: bool  # something was found that the other ranks do not know yet

    def agree(
        self, layer: int, decision: Decision, plan: Plan | None, loads: NDArray[np.int64]
    ) -> bool:
        """Whether all ranks have the same, right plan; called before anything moves."""

    def check_routed(
        self, topk_ids: torch.Tensor, physical: torch.Tensor, load: NDArray[np.int64]
    ) -> None:
        """Check the layer that the engine is about to compute."""

    def check_computed(self) -> None:
        """Check the layer that the engine has computed."""

    def cannot_reroute(self, layer: int) -> None:
        """The layer's plan has fewer places than this rank's tokens, which stay at home."""


class HostBalancer:
    """Balances the MoE layers of one rank. All ranks must call ``route`` in the same order."""

    def __init__(
        self,
        setup: GroupSetup,
        layers: list[LayerSlots],
        fabric: HostFabric,
        policies: PolicySource | None,
        recorder: Recorder,
        costs: IntegerCosts | None = None,
        samples: HostSamples | None = None,
    ) -> None:
        """``layers`` in the order they run; ``policies`` is rank 0's, the others follow it.

        ``costs``, the same on every rank, decide when moving weights pays; without them it
        always does. ``samples`` check some of the layers, on every rank or on none.
        """
        self._config, self._view = setup.config, setup.view
        shape = setup.shape
        self._source_rank, self._relay = setup.source_rank, setup.relay
        self._context = setup.context  # with the speeds of the batch that runs
        self._layers = layers
        self._fabric = fabric
        self._policies = policies
        self._recorder = recorder
        self._costs, self._samples = costs, samples
        self._speeds = RankSpeeds(setup.config.speeds, fabric.rank, shape, costs)
        self._identity = torch.from_numpy(
            identity_table(shape.num_logical_experts, shape.num_ranks, shape.num_slots)
        )
        slots = shape.num_ranks, shape.num_slots
        self._no_slots = np.full(slots, -1, np.int32), np.zeros(slots, np.int32)
        self._batch = 0
        self._batch_policy: Policy | None = None  # agreed on in the first layer of the batch
        self._max_imbalance = round(setup.config.max_imbalance * _MILLION)
        self._time = 0  # of an assignment, in picoseconds, that this rank publishes
        self._warned = False
        self._routed: _Routed | None = None  # what `computed` will record
        self._clock = HostClock()  # of its experts

    @marking_failure
    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        """Physical ids (T, K) int32 for logical ``topk_ids`` (T, K), padding -1 kept.

        ``layer`` counts MoE layers from 0 in the order they run, ``batch_tokens`` is the batch's
        token count over all ranks. Micro-batches overlap on GPUs only; here there is number 0.
        Raises PeerTimeoutError when a rank is gone.
        """
        assert micro_batch == 0, "layers of a host run one after another"
        first = layer == 0
        if first:
            self._recorder.write_kept()  # of the batch before, which speeds learn from
            self._batch += 1
            self._batch_policy = None
            self._time = self._speeds.end_batch()
        if batch_tokens < self._config.min_batch_tokens:
            return self._skip(first, Decision.SMALL, topk_ids)
        if not first and self._batch_policy is Policy.OFF:
            return self.identity(topk_ids)
        watch = Stopwatch()
        load, unknown = count(topk_ids, self._context.shape.num_logical_experts)
        watch.lap(Stage.COUNT)
        loads, inconsistent = self._exchange(load, unknown)
        watch.lap(Stage.EXCHANGE)
        if self._batch_policy is Policy.OFF:
            return self._skip(first, Decision.POLICY_OFF, topk_ids)
        decision, plan = self._plan(loads, inconsistent)
        watch.lap(Stage.PLAN)
        if self._samples and not self._samples.agree(layer, decision, plan, loads):
            decision, plan = Decision.INCONSISTENT, None
        watch.leave_out()
        sent = self._replicate(layer, plan)
        watch.lap(Stage.REPLICATE)
        physical = self._reroute(layer, topk_ids, plan, decision, loads)
        watch.lap(Stage.REROUTE)
        place = LayerPlace(self._batch, layer, batch_tokens)
        policy, ids = self._batch_policy or Policy.OFF, (topk_ids, physical, load)
        self._routed = _Routed(place, policy, decision, loads, plan, sent, watch, ids)
        return physical

    @marking_failure
    def receive(self, micro_batch: int = 0) -> HostClock:
        """Return when this rank's slots have arrived, of the layer that was routed last."""
        if self._routed is not None:
            layer, plan, watch = self._routed.place.layer, self._routed.plan, self._routed.watch
            watch.lap(Stage.COMPUTE)  # the engine's dispatch is a part of it
            self._wait_slots(layer, plan)
            watch.lap(Stage.WAIT)
            if self._samples is not None:
                self._samples.check_routed(*self._routed.ids)
                watch.leave_out()
        self._clock = HostClock()
        return self._clock

    @property
    def is_waiting(self) -> bool:
        return False  # its waits look at processes themselves

    @marking_failure
    def computed(self, micro_batch: int = 0) -> None:
        """Record the layer that was routed last, which the engine has computed."""
        if self._routed is not None:
            self._routed.watch.lap(Stage.COMPUTE)
            is_last = self._routed.place.layer == len(self._layers) - 1
            make = partial(self._record, self._routed, self._clock.nanoseconds)
            self._recorder.record_later(make, ends_batch=is_last)
            self._routed = None
            if self._samples is not None:
                self._samples.check_computed()

    def end_loading(self) -> None:
        """Expect others to answer within the timeout; before this they may be compiling."""
        self._fabric.wait_at_least(0)

    def identity(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Send every assignment to its master, (T, K) int32; padding and unknown ids become -1."""
        return master_ids(topk_ids, self._identity)

    def _skip(self, first: bool, decision: Decision, topk_ids: torch.Tensor) -> torch.Tensor:
        if first:
            self._recorder.count_batch(decision)
        return self.identity(topk_ids)

    def _exchange(self, load: NDArray[np.int64], unknown: int) -> tuple[NDArray[np.int64], bool]:
        """Loads (R, E) and whether ranks contradict each other; agrees on the batch's policy too.

        Tokens that all ranks see count as rank 0's, so that every rank splits them alike.
        """
        has_load = self._view is TokenView.OWN
        doubt = self._samples is not None and self._samples.is_in_doubt
        rows = self._fabric.exchange(write_row(load, unknown, self._choice(), has_load, doubt))
        if self._batch_policy is None:
            self._agree(rows)
        doubt, unknown_ids, differ = contradictions(rows)
        if doubt:
            self._switch_off()
        if has_load:
            return rows[:, HEADER_WIDTH:], unknown_ids
        loads = np.zeros((self._context.shape.num_ranks, load.size), dtype=np.int64)
        loads[0] = load
        return loads, unknown_ids or differ

    def _switch_off(self) -> None:
        """A rank is in doubt, as all know: the batch is off, and so are those that follow."""
        self._batch_policy = Policy.OFF
        if self._samples is not None:
            self._samples.is_in_doubt = False
        if self._policies is not None:
            try:
                self._policies.switch_off_in_doubt()
            except ControlError as error:
                self._policies = None  # which is off
                logger.error("ultraep: off until the engine is restarted: %s", error)

    def _choice(self) -> Choice:
        """What this rank says at the first layer of a batch."""
        if self._batch_policy is not None:
            return Choice()
        if self._policies is None:
            return Choice(time=self._time)
        return Choice(self._policies.policy.code, self._policies.speeds.code, self._time)

    def _agree(self, rows: NDArray[np.int64]) -> None:
        """Settle what holds for this batch, from all ranks' rows (R, W) of its first layer."""
        self._batch_policy = list(Policy)[int(rows[0, POLICY])]
        self._speeds.begin_batch(rows[:, TIME], list(SpeedSource)[int(rows[0, SPEEDS])])
        self._context = replace(self._context, speeds=self._speeds.values)

    def _plan(self, loads: NDArray[np.int64], inconsistent: bool) -> tuple[Decision, Plan | None]:
        """Decide what to do with these loads; there is a plan where the decision is PLANNED."""
        if inconsistent:
            self._warn("ids or loads differ between ranks; inconsistent batches are not balanced")
            return Decision.INCONSISTENT, None
        if self._batch_policy is Policy.IDEAL:
            return Decision.FORCED, None
        context = self._context
        load = context.rank_loads(loads)
        before = context.busiest_time(load)
        whole = int(load.sum()) * FULL_SPEED
        if before * int(context.speeds.sum()) * _MILLION <= self._max_imbalance * whole:
            return Decision.BALANCED, None
        if not self._pays(before, context.least_time(load), _ONE_EXPERT):
            return Decision.UNPROFITABLE, None
        plan = plan_quota(loads, context, self._source_rank)
        transfer = transfer_of(plan.slot_expert, context.shape.num_masters)
        after = context.busiest_time(plan.quota.sum(axis=0))
        if not self._pays(before, after, transfer):
            return Decision.UNPROFITABLE, None
        return Decision.PLANNED, plan

    def _pays(self, before: int, after: int, transfer: Transfer) -> bool:
        """Whether moving weights saves time: the busiest rank's is ``before`` or ``after``."""
        if self._costs is None:
            return after < before
        return saved_picoseconds(before, after, self._context.shape, transfer, self._costs) > 0

    def _replicate(self, layer: int, plan: Plan | None) -> int:
        """Push and relay this rank's part; returns bytes sent."""
        if plan is None:
            return 0
        masters = self._context.shape.num_masters
        parents = relay_parents(plan.slot_expert, masters, self._relay, least_saved(self._costs))
        slots = self._layers[layer]
        self._fabric.stream(slots, plan.slot_expert, parents, masters)
        sent, _ = experts_moved(plan.slot_expert, masters, parents)
        return sent[self._fabric.rank] * slots.bytes_per_expert

    def _reroute(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        plan: Plan | None,
        decision: Decision,
        loads: NDArray[np.int64],
    ) -> torch.Tensor:
        if decision is Decision.FORCED:
            speeds = torch.from_numpy(self._context.speeds)
            first = int(loads[: self._source_rank].sum())
            return forced_ids(topk_ids, self._identity, speeds, first)
        if plan is None:
            return self.identity(topk_ids)
        masters = self._context.shape.num_masters
        try:
            return reroute(topk_ids, plan.share, plan.slot_expert, masters)
        except ValueError:
            if self._samples is None or self._view is TokenView.SHARED:
                raise  # others may do something else with the same tokens
            self._samples.cannot_reroute(layer)
            return self.identity(topk_ids)

    def _wait_slots(self, layer: int, plan: Plan | None) -> None:
        if plan is not None:
            self._fabric.wait_slots(self._layers[layer], plan.slot_expert)

    def _record(self, routed: "_Routed", experts_ns: int) -> LayerRecord:
        """The record of a layer, from which speeds learn too."""
        outcome = self._outcome(routed)
        self._speeds.add_layer(experts_ns, outcome.load_after)
        return LayerRecord.of(
            routed.place,
            outcome,
            routed.loads[self._fabric.rank],
            rank=self._fabric.rank,
            expert_bytes=self._layers[routed.place.layer].bytes_per_expert,
            bytes_sent=routed.sent,
            stage_ns=routed.watch.nanoseconds,
            experts_ns=experts_ns,
        )

    def _outcome(self, routed: "_Routed") -> LayerOutcome:
        slot_expert, slot_load = self._no_slots
        if routed.plan is not None:
            slot_expert, slot_load = routed.plan.slot_expert, routed.plan.slot_load
        return LayerOutcome(
            decision=routed.decision,
            policy=routed.policy,
            expert_load=routed.loads.sum(axis=0),
            speed=self._context.speeds,
            slot_expert=slot_expert,
            slot_load=slot_load,
        )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)


@dataclass(frozen=True)
class _Routed:
    """A layer between ``route`` and its record."""

    place: LayerPlace
    policy: Policy
    decision: Decision
    loads: NDArray[np.int64]  # (R, E)
    plan: Plan | None
    sent: int  # bytes that this rank sent
    watch: Stopwatch
    ids: tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]  # logical, physical; load (E,)
