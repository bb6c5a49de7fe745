"""What came of layers, from the device's outcome to the recorder."""

import logging
from typing import Any

import numpy as np
from ultraep_kernels.device.outcome import unpack_outcome
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.recording import PendingBatch, PendingLayer
from ultraep_serve.balance.speeds import OwnTime
from ultraep_serve.telemetry.record import LayerRecord, rank_loads, stored_record
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, IntArray, Stage, TokenView

__all__ = ["Records"]

logger = logging.getLogger(__name__)

_UNTIMED = 1, [0] * len(Stage)


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
        self._expert_bytes = np.array(expert_bytes)
        # tokens that all ranks see are rank 0's own
        self._is_own = setup.view is TokenView.OWN or setup.location.rank == 0
        self._recorder = recorder
        self._own_time = own_time
        self._min_saved, self._has_warned = min_saved, False
        self._stage_ns: dict[int, tuple[int, list[int]]] = {}  # of a layer: tokens, times
        shape = setup.shape
        self._sent(np.zeros((1, shape.num_ranks, shape.num_slots), np.int32))  # compiled now

    def write(self, batch: PendingBatch) -> None:
        """Record all layers of one batch in one go; one that was off is counted, once."""
        shape, rank, layers = self._setup.shape, self._setup.location.rank, batch.layers
        sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        found = unpack_outcome(batch.values, *sizes)
        if found.decision[0] == Decision.POLICY_OFF:
            self._recorder.count_batch(Decision.POLICY_OFF)
            return
        if Decision.INCONSISTENT in found.decision and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ids or loads differ between ranks; inconsistent batches are not balanced"
            )
        before, after = rank_loads(
            found.decision, found.expert_load, found.speeds, found.slot_expert, found.slot_load
        )
        self._own_time.end_batch()  # the one before
        experts_ns = [pending.experts_ns for pending in layers]
        for times in zip(
            experts_ns, after[:, rank].tolist(), after.min(axis=1).tolist(), strict=True
        ):
            self._own_time.add(*times)
        numbers = [pending.layer for pending in layers]
        expert_bytes = self._expert_bytes[numbers]
        copies = found.slot_expert >= 0
        columns: dict[str, Any] = {
            "batch": layers[0].batch,
            "assignments": before.sum(axis=1),
            "bytes_sent": self._sent(found.slot_expert) * expert_bytes,
            "bytes_received": copies[:, rank].sum(axis=1) * expert_bytes,
            "experts_ns": experts_ns,
            "layer": numbers,
            "tokens": [pending.tokens for pending in layers],
            "replicas": copies.sum(axis=(1, 2)),
            "decision": found.decision,
            "policy": found.policy,
            "stage_ns": [self._stage_times(pending) for pending in layers],
            "load_before": before,
            "load_after": after,
            "speed": found.speeds,
            "slot_expert": found.slot_expert,
            "slot_load": found.slot_load,
            "expert_load": found.expert_load,
            "own_load": found.own_load if self._is_own else 0,
        }
        self._recorder.record_batch(stored_record(LayerRecord(**columns), shape, len(layers)))

    def _sent(self, slot_expert: IntArray) -> IntArray:
        """Experts that this rank sends in each of N layers, for (N, R, S)."""
        setup, masters, num_slots = self._setup, self._setup.shape.num_masters, slot_expert.shape[2]
        planned = setup.relay, self._min_saved
        parents = np.stack([relay_parents(slots, masters, *planned) for slots in slot_expert])
        sender = np.where(parents >= 0, parents // num_slots, slot_expert // masters)
        is_own = (sender == setup.location.rank) & (slot_expert >= 0)
        sent: IntArray = is_own.sum(axis=(1, 2))
        return sent

    def _stage_times(self, pending: PendingLayer) -> list[int]:
        """Nanoseconds per stage: measured, or by tokens from the batch that last was."""
        if pending.is_timed:
            self._stage_ns[pending.layer] = pending.tokens, pending.nanoseconds
        tokens, times = self._stage_ns.get(pending.layer, _UNTIMED)
        return [time * pending.tokens // tokens for time in times]
