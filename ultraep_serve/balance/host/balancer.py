"""The data flow: exact load -> plan -> replicas -> physical ids, for every layer of every batch.

``HostBalancer.route`` is nearly the whole of it, one line per stage, between an engine's router and
its dispatch; ``receive`` waits before its experts. The engine's own dispatch, expert kernels and
combine run on unchanged.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import FORGET, FULL_SPEED, HEADER_WIDTH, POLICY, TIME, Choice
from ultraep_kernels.host.count import count
from ultraep_kernels.host.exchange import contradictions, write_row
from ultraep_kernels.host.relays import relay_parents
from ultraep_kernels.host.reroute import reroute
from ultraep_kernels.host.speeds import measured_speeds

from ultraep_serve.balance.backend import GroupSetup, LayerBalancer, marking_failure
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.own_time import OwnTime
from ultraep_serve.balance.physical import forced_ids, identity_table, master_ids
from ultraep_serve.balance.records import Records
from ultraep_serve.balance.slots import LayerSlots
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
from ultraep_serve.plan.residents import Residents, prices_of
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder, Stopwatch
from ultraep_serve.types import Decision, Outcome, Plan, Policy, Stage, TokenView

logger = logging.getLogger(__name__)

_ONE_EXPERT = Transfer(busiest_sender=1, busiest_receiver=1)  # the least a fresh plan can move
_MILLION = 10**6


class HostBalancer(LayerBalancer):
    """Balances the MoE layers of one rank, whose experts are in host memory."""

    def __init__(
        self,
        setup: GroupSetup,
        layers: list[LayerSlots],
        fabric: HostFabric,
        policies: ControlPage | None,
        recorder: Recorder,
        costs: IntegerCosts,
        samples: Any = None,
    ) -> None:
        """``layers`` in the order they run; ``policies`` is rank 0's, the others follow it.

        ``costs``, the same on every rank, decide when moving weights pays. ``samples``, of
        ``proof.host``, check some of the layers, on every rank or on none.
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
        self._own_time = OwnTime(costs, shape.num_masters)
        self._measures = setup.speeds is None
        expert_bytes = [layer.bytes_per_expert for layer in layers]
        self._records = Records(setup, expert_bytes, recorder, self._own_time)
        self._identity = torch.from_numpy(
            identity_table(shape.num_logical_experts, shape.num_ranks, shape.num_slots)
        )
        nothing = np.full((shape.num_ranks, shape.num_slots), -1, np.int32)
        self._no_slots = nothing, np.zeros_like(nothing), nothing
        self._prices = prices_of(costs, shape)
        self._residents: list[Residents] = []
        if setup.config.slot_memory == "per_layer":
            self._residents = [Residents(shape, layer) for layer in range(len(layers))]
        self._changes = 0  # how often experts of this rank may have changed
        self._batch = 0
        self._choice = Choice()  # what this rank says in the batch
        self._batch_policy: Policy | None = None  # agreed on in the first layer of the batch
        self._max_imbalance = round(setup.config.max_imbalance * _MILLION)
        self._routed: _Routed | None = None  # the layer that the engine computes
        self._computed: list[_Routed] = []  # of the batch, not recorded yet

    @marking_failure
    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        assert micro_batch == 0, "layers of a host run one after another"
        first = layer == 0
        if first:
            self._record_batch()  # one whose last layer did not come
            self._batch += 1
            policy = Policy.OFF if self._policies is None else self._policies.policy
            self._choice = Choice(policy.code, self._own_time.picoseconds, self._changes)
            self._batch_policy = None
        if batch_tokens < self._config.min_batch_tokens:
            return self._skip(first, Decision.SMALL, topk_ids)
        if not first and self._batch_policy is Policy.OFF:
            return self.identity(topk_ids)
        watch = Stopwatch()
        load, unknown = count(topk_ids, self._context.shape.num_logical_experts)
        watch.lap(Stage.COUNT)
        loads, inconsistent = self._exchange(layer, load, unknown)
        watch.lap(Stage.EXCHANGE)
        if self._batch_policy is Policy.OFF:
            return self._skip(first, Decision.POLICY_OFF, topk_ids)
        decision, plan = self._plan(layer, loads, inconsistent)
        watch.lap(Stage.PLAN)
        if self._samples is not None and not self._samples.agree(layer, decision, plan, loads):
            decision, plan = Decision.INCONSISTENT, None
        watch.leave_out()
        sent = self._replicate(layer, plan)
        watch.lap(Stage.REPLICATE)
        physical = self._reroute(layer, topk_ids, plan, decision, loads)
        watch.lap(Stage.REROUTE)
        ids, policy = (topk_ids, physical, load), self._batch_policy or Policy.OFF
        outcome = decision, policy.code, sent, loads, plan, self._context.speeds
        self._routed = _Routed(layer, batch_tokens, *outcome, watch, ids)
        return physical

    @marking_failure
    def receive(self, micro_batch: int = 0) -> None:
        routed = self._routed
        if routed is not None:
            routed.watch.lap(Stage.COMPUTE)  # the engine's dispatch is a part of it
            if routed.plan is not None:
                self._fabric.wait_slots(self._layers[routed.layer], routed.plan.copied)
            routed.watch.lap(Stage.WAIT)
            if self._samples is not None:
                self._samples.check_routed(*routed.ids)
                routed.watch.leave_out()
            routed.experts_ns = -time.perf_counter_ns()

    def experts_done(self, micro_batch: int = 0) -> None:
        if self._routed is not None:
            self._routed.experts_ns += time.perf_counter_ns()

    @marking_failure
    def computed(self, micro_batch: int = 0) -> None:
        routed, self._routed = self._routed, None
        if routed is None:
            return
        routed.watch.lap(Stage.COMPUTE)
        self._computed.append(routed)
        self._recorder.progress += 1
        if self._samples is not None:
            self._samples.check_computed()
        if routed.layer == len(self._layers) - 1:
            self._record_batch()

    def forget(self) -> None:
        self._changes += 1
        self._choice = self._choice._replace(changes=self._changes)  # also of a batch that runs

    def identity(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Send every assignment to its master, (T, K) int32; padding and unknown ids become -1."""
        return master_ids(topk_ids, self._identity)

    def _skip(self, first: bool, decision: Decision, topk_ids: torch.Tensor) -> torch.Tensor:
        if first:
            self._recorder.count_batch(decision)
        return self.identity(topk_ids)

    def _exchange(
        self, layer: int, load: NDArray[np.int64], unknown: int
    ) -> tuple[NDArray[np.int64], bool]:
        """Loads (R, E) and whether ranks contradict each other; agrees on the batch's policy too.

        Tokens that all ranks see count as rank 0's, so that every rank splits them alike.
        """
        has_load = self._view is TokenView.OWN
        doubt = self._samples is not None and self._samples.is_in_doubt
        rows = self._fabric.exchange(write_row(load, unknown, self._choice, has_load, doubt))
        if self._batch_policy is None:  # what holds for the batch is settled in its first layer
            self._batch_policy = list(Policy)[int(rows[0, POLICY])]
            if self._measures:
                self._context = replace(self._context, speeds=measured_speeds(rows[:, TIME]))
        doubt, unknown_ids, differ = contradictions(rows)
        if doubt:
            self._switch_off()
        if self._residents:
            self._residents[layer].heed(int(rows[:, FORGET].sum()))
        if has_load:
            return rows[:, HEADER_WIDTH:], unknown_ids
        loads = np.zeros((self._context.shape.num_ranks, load.size), dtype=np.int64)
        loads[0] = load
        return loads, unknown_ids or differ

    def _switch_off(self) -> None:
        """A rank is in doubt, as all know: the batch is off, and so are those that follow."""
        self._batch_policy = Policy.OFF
        for residents in self._residents:
            residents.forget()
        if self._samples is not None:
            self._samples.is_in_doubt = False
        if self._policies is not None:
            try:
                self._policies.switch_off_in_doubt()
            except ControlError as error:
                self._policies = None  # which is off
                logger.error("ultraep: off until the engine is restarted: %s", error)

    def _plan(
        self, layer: int, loads: NDArray[np.int64], inconsistent: bool
    ) -> tuple[Decision, Plan | None]:
        """Decide what to do with these loads; there is a plan where the decision is PLANNED."""
        if inconsistent:
            return Decision.INCONSISTENT, None
        if self._batch_policy is Policy.IDEAL:
            return Decision.FORCED, None
        context = self._context
        load = context.rank_loads(loads)
        before = context.busiest_time(load)
        whole = int(load.sum()) * FULL_SPEED
        if before * int(context.speeds.sum()) * _MILLION <= self._max_imbalance * whole:
            return Decision.BALANCED, None
        if self._residents:
            plan = self._residents[layer].plan(loads, context, self._source_rank, self._prices)
            if (plan.copied >= 0).any():  # which may pay for themselves in batches to come only
                return Decision.PLANNED, plan
        elif self._pays(before, context.least_time(load), _ONE_EXPERT):
            plan = plan_quota(loads, context, self._source_rank)
        else:
            return Decision.UNPROFITABLE, None
        transfer = transfer_of(plan.copied, context.shape.num_masters)
        after = context.busiest_time(plan.quota.sum(axis=0))
        if not self._pays(before, after, transfer):
            return Decision.UNPROFITABLE, None
        return Decision.PLANNED, plan

    def _pays(self, before: int, after: int, transfer: Transfer) -> bool:
        """Whether moving weights saves time: the busiest rank's is ``before`` or ``after``."""
        return saved_picoseconds(before, after, self._context.shape, transfer, self._costs) > 0

    def _replicate(self, layer: int, plan: Plan | None) -> int:
        """Push and relay this rank's part; returns how many experts."""
        if plan is None:
            return 0
        masters = self._context.shape.num_masters
        if self._residents:
            self._residents[layer].take(plan)
        parents = relay_parents(plan.copied, masters, self._relay, least_saved(self._costs))
        self._fabric.stream(self._layers[layer], plan.copied, parents, masters)
        sent, _ = experts_moved(plan.copied, masters, parents)
        return sent[self._fabric.rank]

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

    def _record_batch(self) -> None:
        done, self._computed = self._computed, []
        if not done:
            return
        plans = [each.plan for each in done]
        slots = [
            self._no_slots if plan is None else (plan.slot_expert, plan.slot_load, plan.copied)
            for plan in plans
        ]
        held, loads_of_slots, copied = map(np.stack, zip(*slots, strict=True))
        loads = np.stack([each.loads for each in done])
        found = Outcome(
            decision=np.array([each.decision for each in done]),
            policy=np.array([each.policy for each in done]),
            sent=np.array([each.sent for each in done]),
            expert_load=loads.sum(axis=1),
            own_load=loads[:, self._source_rank],
            slot_expert=held,
            is_copied=copied >= 0,
            slot_load=loads_of_slots,
            speed=np.stack([each.speed for each in done]),
        )
        layers, tokens = [each.layer for each in done], [each.tokens for each in done]
        stage_ns = np.array([each.watch.nanoseconds for each in done])
        experts_ns = [max(0, each.experts_ns) for each in done]
        self._records.write(self._batch, layers, tokens, found, stage_ns, experts_ns)


@dataclass
class _Routed:
    """A layer between ``route`` and its record."""

    layer: int
    tokens: int
    decision: Decision
    policy: int  # its code
    sent: int  # experts that this rank sent
    loads: NDArray[np.int64]  # (R, E)
    plan: Plan | None
    speed: NDArray[np.int64]  # (R,) that was planned with
    watch: Stopwatch
    ids: tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]  # logical, physical; load (E,)
    experts_ns: int = 0  # that they took; below 0 while they run
