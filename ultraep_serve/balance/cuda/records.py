"""What came of layers, from the device's outcome to the recorder."""

import logging

import numpy as np
from ultraep_kernels.device.outcome import Outcome, unpack_outcome
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.recording import PendingLayer
from ultraep_serve.balance.speeds import OwnTime
from ultraep_serve.costs.model import experts_moved
from ultraep_serve.telemetry.record import LayerOutcome, LayerPlace, LayerRecord
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, IntArray, Policy, Stage, TokenView

__all__ = ["Records"]

logger = logging.getLogger(__name__)


class Records:
    """Writes the records of one rank."""

    def __init__(
        self,
        setup: GroupSetup,
        expert_bytes: list[int],
        recorder: Recorder,
        own_time: OwnTime,
        min_saved: int,
    ) -> None:
        """``expert_bytes`` of one expert by layer; ``own_time`` learns how long experts took.

        ``min_saved`` as for ``relay_parents``.
        """
        self._setup = setup
        self._expert_bytes = expert_bytes
        self._recorder = recorder
        self._own_time, self._timed_batch = own_time, 0
        self._min_saved, self._has_warned = min_saved, False
        self._stage_ns: dict[int, tuple[int, list[int]]] = {}  # of a layer: tokens, times

    def write(self, pending: PendingLayer) -> None:
        """Record one layer of one batch; a batch that was off is counted, once."""
        shape, rank = self._setup.shape, self._setup.location.rank
        relay = self._setup.relay
        sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        found = unpack_outcome(pending.values, *sizes)
        outcome = LayerOutcome(
            decision=Decision(found.decision),
            policy=list(Policy)[found.policy],
            expert_load=found.expert_load,
            speed=found.speeds,
            slot_expert=found.slot_expert,
            slot_load=found.slot_load,
        )
        if outcome.decision is Decision.POLICY_OFF:  # of the whole batch, which counts once
            if pending.layer == pending.micro_batch == 0:
                self._recorder.count_batch(outcome.decision)
            return
        if outcome.decision is Decision.INCONSISTENT and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ids or loads differ between ranks; inconsistent batches are not balanced"
            )
        if pending.batch != self._timed_batch:
            self._timed_batch = pending.batch
            self._own_time.end_batch()
        after, slots = outcome.load_after, outcome.slot_expert
        self._own_time.add(pending.experts_ns, int(after[rank]), int(after.min()))
        expert_bytes = self._expert_bytes[pending.layer]
        parents = relay_parents(slots, shape.num_masters, relay, self._min_saved)
        sent, _ = experts_moved(slots, shape.num_masters, parents)
        self._recorder.record(
            LayerRecord.of(
                LayerPlace(pending.batch, pending.layer, pending.tokens),
                outcome,
                self._own_load(found),
                rank=rank,
                expert_bytes=expert_bytes,
                bytes_sent=sent[rank] * expert_bytes,
                stage_ns=self._stage_times(pending),
                experts_ns=pending.experts_ns,
            )
        )

    def _own_load(self, found: Outcome) -> IntArray:
        """(E,); tokens that all ranks see are rank 0's own."""
        is_own = self._setup.view is TokenView.OWN or self._setup.location.rank == 0
        return found.own_load if is_own else np.zeros_like(found.own_load)

    def _stage_times(self, pending: PendingLayer) -> list[int]:
        """Nanoseconds per stage: measured, or by tokens from the batch that last was."""
        if pending.is_timed:
            self._stage_ns[pending.layer] = pending.tokens, pending.nanoseconds
        tokens, times = self._stage_ns.get(pending.layer, (1, [0] * len(Stage)))
        return [time * pending.tokens // tokens for time in times]
