"""The data flow on the device, for which the host never waits; twin of ``host.balancer``.

Its answers are the same. What the host decides there, kernels decide here: the host only launches,
the same for every batch, so that any of it can be captured in a CUDA graph. What came of a layer it
learns from notes that are done when it comes by again.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED, HEADER_WIDTH, Choice
from ultraep_kernels.device.count import Counted, count
from ultraep_kernels.device.exchange import write_row
from ultraep_kernels.device.identity import identity
from ultraep_kernels.device.outcome import Outcome, outcome_width, pack_outcome, unpack_outcome
from ultraep_kernels.device.plan import DevicePlan, Gate, plan
from ultraep_kernels.device.reroute import reroute
from ultraep_kernels.device.speeds import choose_speeds
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.backend import GroupSetup, LayerSlots, PolicySource
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.cuda.fabric import DeviceFabric
from ultraep_serve.cuda.recording import Lap, Ledger, Note, Unnoted, is_capturing
from ultraep_serve.errors import ConfigError
from ultraep_serve.physical import experts_sent, forced_ids, identity_table
from ultraep_serve.ring.recorder import Recorder
from ultraep_serve.speeds import OwnTime, expert_clock, fixed_speeds
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage, TokenView

if TYPE_CHECKING:
    from ultraep_serve.config import BalanceConfig

__all__ = ["DeviceBalancer", "device_row_width", "require_offered"]

logger = logging.getLogger(__name__)

_LARGEST = np.iinfo(np.int32).max
_WARM_UP_IDS = (1, 257, 2048)  # Triton compiles apart: 1, what 16 divides, and all else
_BATCHES_ON_THEIR_WAY = 2  # whose records the host may be behind the device


def device_row_width(num_logical_experts: int, view: TokenView) -> int:
    """int32 that a rank contributes to an exchange; loads travel only where they differ."""
    return HEADER_WIDTH + (num_logical_experts if view is TokenView.OWN else 0)


def require_offered(config: "BalanceConfig") -> None:
    """Raise ConfigError for a policy that no kernel plans."""
    if config.policy is Policy.EPLB_SLOTS:
        raise ConfigError("policy 'eplb-slots' is not offered on GPUs; choose off, quota or ideal")


class DeviceBalancer:
    """Balances the MoE layers of one rank. All ranks must call ``route`` in the same order.

    Differences to ``HostBalancer``: while the policy is off at run time, loads are still exchanged
    and planned for, since only the device knows; nothing is moved. Policy eplb-slots, asked for at
    run time, counts as off, and so does ideal without ``allow_ideal``. Relays follow the published
    rule, whatever they cost.

    Records come when the host comes by after the device is done, at a later ``route`` or
    ``computed``; where more layers than those of two batches are on their way, one is lost and
    counted. Nothing is recorded while a CUDA graph is captured, nor when one is replayed; a replay
    obeys the policy that rank 0 last read in a ``route``.

    A wait that was given up is noticed at the first ``route`` after the device has said so; what
    was computed in between is wrong, and the engine must not answer with it: it is restarted.
    """

    def __init__(
        self,
        setup: GroupSetup,
        layers: list[LayerSlots],
        fabric: DeviceFabric,
        policies: PolicySource | None,
        recorder: Recorder,
        costs: IntegerCosts | None = None,
    ) -> None:
        """As ``HostBalancer``. Raises ConfigError for a policy that is not offered."""
        config, shape = setup.config, setup.shape
        require_offered(config)
        self._config, self._shape, self._view = config, shape, setup.view
        self._source_rank, self._domain_size = setup.source_rank, setup.location.domain_size
        self._fabric = fabric
        self._policies = policies
        self._recorder = recorder
        self._gate = _gate_of(config, costs)
        self._tables = [fabric.tables(layer) for layer in layers]
        self._expert_bytes = [int(layer.expert_bytes.sum()) for layer in layers]
        experts, ranks, slots = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        self._device = device = fabric.status.device
        self._identity = torch.from_numpy(identity_table(experts, ranks, slots)).to(device)
        # The host writes its choice whenever it likes; the device takes it at layer 0 of a batch.
        self._choice = torch.zeros(len(Choice._fields), dtype=torch.int32, device=device)
        self._asked = torch.zeros(
            self._choice.shape, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._configured = _on_device(fixed_speeds(config.speeds, ranks), device)
        self._agreed = torch.full((ranks,), FULL_SPEED, dtype=torch.int32, device=device)
        self._speeds = self._agreed.clone()  # of the batch that runs
        self._own_time, self._timed_batch = OwnTime(costs, self._shape.num_masters), 0
        self._shared_loads = torch.zeros((ranks, experts), dtype=torch.int32, device=device)
        self._ledger = Ledger(
            device,
            outcome_width(experts, ranks, slots),
            _BATCHES_ON_THEIR_WAY * len(layers) * shape.num_micro_batches,
        )
        self._batch = 0
        self._warned: set[str] = set()

    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor:
        """Physical ids (T, K) on the device for logical ``topk_ids`` (T, K), padding -1 kept.

        Both are int32 or int64.

        ``layer`` counts MoE layers from 0 in the order they run, ``batch_tokens`` is the batch's
        token count over all ranks. Micro-batches of a batch may overlap: number 1 is routed before
        the engine has computed number 0. They come in the same order in every layer, on every rank,
        and have ``batch_tokens`` of their own. Raises PeerTimeoutError when a rank is gone, batches
        later; then for every micro-batch of a layer, because their threads wait for each other.
        """
        self._fabric.check_peers(look=micro_batch == 0)
        capturing = is_capturing(self._device)
        begins = layer == 0 and micro_batch == 0
        if begins:
            self._batch += not capturing
            self._choose()
        if not capturing:
            self._record_what_is_done()
        if batch_tokens < self._config.min_batch_tokens:
            if begins and not capturing:
                self._ledger.skip(Decision.SMALL)
                self._record_what_is_done()
            return self.identity(topk_ids)
        if begins:
            self._choice.copy_(self._asked, non_blocking=True)
        note = None
        if not capturing:
            note = self._ledger.open(layer, self._batch, batch_tokens, micro_batch)
            if note is None:
                self._recorder.count_lost()
        if self._shape.num_micro_batches == 1:  # else another one's experts may run meanwhile
            expert_clock.marks = note
        return self._balance(layer, topk_ids, note, micro_batch)

    def computed(self, micro_batch: int = 0) -> None:
        """The engine has launched the layer that ``route`` was called for last."""
        expert_clock.marks = None
        if not is_capturing(self._device):
            self._ledger.close(micro_batch)
            self._record_what_is_done()

    def identity(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Every assignment to its master, (T, K) as given; padding and unknown ids become -1."""
        shape = self._shape
        return identity(topk_ids, shape.num_logical_experts, shape.num_masters, shape.num_slots)

    def warm_up(self) -> None:
        """Compile every kernel, by routing nothing but padding; all ranks together."""
        for num_ids in _WARM_UP_IDS:
            for dtype in (torch.int32, torch.int64):  # routers give either
                padding = torch.full((num_ids, 1), -1, dtype=dtype, device=self._device)
                self.identity(padding)
                self._balance(0, padding, None, 0)
        self._fabric.require_peers()

    def _balance(
        self, layer: int, topk_ids: torch.Tensor, note: Note | None, micro_batch: int
    ) -> torch.Tensor:
        watch: Lap = note or Unnoted()
        counted = count(topk_ids, self._shape.num_logical_experts)
        watch.lap(Stage.COUNT)
        rows = self._exchange(counted)
        if layer == micro_batch == 0:
            choose_speeds(rows, self._configured, self._agreed, self._speeds)
        watch.lap(Stage.EXCHANGE)
        found = plan(
            self._loads(rows, counted),
            self._shape.num_replica_slots,
            self._source_rank,
            self._fabric.status,
            domain_size=self._domain_size,
            gate=self._gate,
            rows=rows,
            speeds=self._speeds,
        )
        found = self._among_all_slots(found, micro_batch)
        watch.lap(Stage.PLAN)
        self._replicate(layer, found)
        watch.lap(Stage.REPLICATE)
        physical = self._reroute(topk_ids, counted, found)
        watch.lap(Stage.REROUTE)
        self._wait_slots(layer, found)
        watch.lap(Stage.WAIT)
        self._fabric.report()
        if note is not None:
            note.fill(pack_outcome(found, rows, self._speeds))
        return physical

    def _choose(self) -> None:
        """Every rank says what it measured, rank 0 what it would have beside that."""
        time = min(self._own_time.picoseconds, _LARGEST)
        if self._policies is None:
            self._asked[:] = torch.tensor(Choice(time=time))
            return
        policy = self._policies.policy
        ideal = policy is Policy.IDEAL and self._config.allow_ideal
        if not (ideal or policy in (Policy.OFF, Policy.QUOTA)):
            self._warn(f"policy {policy.value!r} is not offered here and counts as 'off'")
            policy = Policy.OFF
        threshold = min(self._policies.max_imbalance_millionths, _LARGEST)
        asked = Choice(policy.code, threshold, self._policies.speeds.code, time)
        self._asked[:] = torch.tensor(asked)

    def _exchange(self, counted: Counted) -> torch.Tensor:
        """Every rank's row (R, W) int32."""
        has_load = self._view is TokenView.OWN
        row = write_row(counted.load, counted.unknown, self._choice, has_load)
        return self._fabric.exchange(row)

    def _loads(self, rows: torch.Tensor, counted: Counted) -> torch.Tensor:
        """Tokens that all ranks see count as rank 0's, so that every rank splits them alike."""
        if self._view is TokenView.OWN:
            return rows[:, HEADER_WIDTH:]
        self._shared_loads[0] = counted.load
        return self._shared_loads

    def _among_all_slots(self, found: DevicePlan, micro_batch: int) -> DevicePlan:
        """``slot_expert`` (R, S) in the micro-batch's part of the slots of all M (R, M * S).

        Another one's may still be read. Its own are free: the exchange followed its expert kernel.
        """
        shape = self._shape
        if shape.num_micro_batches == 1:
            return found
        placed = found.slot_expert.new_full((shape.num_ranks, shape.num_slots), -1)
        first = micro_batch * shape.num_replica_slots
        placed[:, first : first + shape.num_replica_slots] = found.slot_expert
        return replace(found, slot_expert=placed)

    def _replicate(self, layer: int, found: DevicePlan) -> None:
        if self._shape.num_replica_slots:
            masters, relay = self._shape.num_masters, self._config.relay
            self._fabric.stream(self._tables[layer], found.slot_expert, masters, relay)

    def _reroute(self, topk_ids: torch.Tensor, counted: Counted, found: DevicePlan) -> torch.Tensor:
        masters, status = self._shape.num_masters, self._fabric.status
        physical = reroute(topk_ids, found.share, found.slot_expert, masters, counted, status)
        if self._config.allow_ideal:
            forced = forced_ids(topk_ids, self._identity, self._speeds)
            physical = torch.where(found.decision == Decision.FORCED, forced, physical)
        return physical

    def _wait_slots(self, layer: int, found: DevicePlan) -> None:
        if self._shape.num_replica_slots:
            self._fabric.wait_slots(self._tables[layer], found.slot_expert)

    def _record_what_is_done(self) -> None:
        for entry in self._ledger.drain():
            if isinstance(entry, Note):
                self._record(entry)
            else:
                self._recorder.count_batch(entry)

    def _record(self, note: Note) -> None:
        shape, rank = self._shape, self._fabric.rank
        sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        outcome = unpack_outcome(note.values, *sizes)
        decision = Decision(outcome.decision)
        if decision is Decision.POLICY_OFF:  # of the whole batch, which counts once
            if note.layer == note.micro_batch == 0:
                self._recorder.count_batch(decision)
            return
        if decision is Decision.INCONSISTENT:
            self._warn("ids or loads differ between ranks; inconsistent batches are not balanced")
        before, after = _rank_loads(outcome, decision, shape)
        if note.batch != self._timed_batch:
            self._timed_batch = note.batch
            self._own_time.end_batch()
        self._own_time.add(note.experts_ns, int(after[rank]), int(after.min()))
        slots, expert_bytes = outcome.slot_expert, self._expert_bytes[note.layer]
        parents = relay_parents(slots, shape.num_masters, self._config.relay, self._domain_size)
        self._recorder.record(
            layer=note.layer,
            batch=note.batch,
            tokens=note.tokens,
            decision=decision,
            policy=list(Policy)[outcome.policy],
            replicas=int((slots >= 0).sum()),
            bytes_sent=experts_sent(rank, slots, parents, shape.num_masters) * expert_bytes,
            bytes_received=int((slots[rank] >= 0).sum()) * expert_bytes,
            stage_ns=note.nanoseconds,
            load_before=before,
            load_after=after,
            slot_expert=slots,
            slot_load=outcome.slot_load,
            expert_load=outcome.expert_load,
            speed=outcome.speeds,
            experts_ns=note.experts_ns,
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


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


def _rank_loads(
    outcome: Outcome, decision: Decision, shape: ExpertShape
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assignments per rank (R,) where masters compute everything, and as they were computed."""
    load = outcome.expert_load.astype(np.int64)
    before: NDArray[np.int64] = load.reshape(shape.num_ranks, -1).sum(axis=1)
    if decision is Decision.FORCED:
        return before, before.sum() * outcome.speeds // outcome.speeds.sum(dtype=np.int64)
    filled = outcome.slot_expert >= 0
    after = before + outcome.slot_load.sum(axis=1)
    owners = outcome.slot_expert[filled] // shape.num_masters
    np.subtract.at(after, owners, outcome.slot_load[filled])
    return before, after
