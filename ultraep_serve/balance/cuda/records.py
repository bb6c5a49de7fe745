"""What came of layers, from the device's outcome to the recorder."""

import logging
from typing import Any

import numpy as np
from ultraep_kernels.device.outcome import unpack_outcome

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.recording import PendingBatch
from ultraep_serve.balance.speeds import OwnTime
from ultraep_serve.telemetry.record import LayerRecord, rank_loads, stored_record
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, IntArray, Stage, TokenView

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
    ) -> None:
        """``expert_bytes`` of one expert by layer; ``own_time`` learns how long experts took."""
        self._setup = setup
        self._expert_bytes = np.array(expert_bytes)
        # tokens that all ranks see are rank 0's own
        self._is_own = setup.view is TokenView.OWN or setup.location.rank == 0
        self._recorder = recorder
        self._own_time = own_time
        self._has_warned = False
        # of each layer, in the batch that last was timed
        self._stage_ns = np.zeros((len(expert_bytes), len(Stage)), np.int64)
        self._timed_tokens = np.ones((len(expert_bytes), 1), np.int64)

    def write(self, batch: PendingBatch) -> None:
        """Record all layers of one batch in one go; one that was off is counted, once."""
        shape, rank, layers = self._setup.shape, self._setup.location.rank, batch.layers
        sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        found = unpack_outcome(batch.values, *sizes)
        decisions = found.decision.tolist()
        if decisions[0] == Decision.POLICY_OFF:
            self._recorder.count_batch(Decision.POLICY_OFF)
            return
        if Decision.INCONSISTENT in decisions and not self._has_warned:
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
        tokens = np.array([pending.tokens for pending in layers])
        expert_bytes = self._expert_bytes[numbers]
        copies = found.slot_expert >= 0
        columns: dict[str, Any] = {
            "batch": batch.number,
            "assignments": before.sum(axis=1),
            "bytes_sent": found.sent * expert_bytes,
            "bytes_received": copies[:, rank].sum(axis=1) * expert_bytes,
            "experts_ns": experts_ns,
            "layer": numbers,
            "tokens": tokens,
            "replicas": copies.reshape(len(layers), -1).sum(axis=1),
            "decision": found.decision,
            "policy": found.policy,
            "stage_ns": self._stage_times(batch, numbers, tokens),
            "load_before": before,
            "load_after": after,
            "speed": found.speeds,
            "slot_expert": found.slot_expert,
            "slot_load": found.slot_load,
            "expert_load": found.expert_load,
            "own_load": found.own_load if self._is_own else 0,
        }
        self._recorder.record_batch(stored_record(LayerRecord(**columns), shape, len(layers)))

    def _stage_times(self, batch: PendingBatch, numbers: list[int], tokens: IntArray) -> IntArray:
        """Nanoseconds (N, stages): measured, or by tokens (N,) from the batch that last was."""
        tokens = tokens[:, None]
        if batch.is_timed:
            self._timed_tokens[numbers] = tokens
            times = np.array([each.nanoseconds for each in batch.layers])
            self._stage_ns[numbers] = times
            return times
        return self._stage_ns[numbers] * tokens // self._timed_tokens[numbers]
