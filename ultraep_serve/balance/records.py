"""What came of a batch, from its layers' outcome to the recorder, on host and GPU alike."""

import logging

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.own_time import OwnTime
from ultraep_serve.telemetry.record import LayerRecord, rank_loads
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, Outcome, TokenView

logger = logging.getLogger(__name__)

Integers = NDArray[np.integer]


class Records:
    """Writes the records of one rank."""

    def __init__(
        self, setup: GroupSetup, expert_bytes: list[int], recorder: Recorder, own_time: OwnTime
    ) -> None:
        """``expert_bytes`` of one expert by layer; ``own_time`` learns how long experts took."""
        self._setup, self._recorder, self._own_time = setup, recorder, own_time
        self._expert_bytes = np.array(expert_bytes)
        # tokens that all ranks see are rank 0's own
        self._is_own = setup.view is TokenView.OWN or setup.location.rank == 0
        self._has_warned = False

    def write(
        self,
        batch: int,
        layers: list[int],
        tokens: list[int],
        found: Outcome,
        stage_ns: Integers,
        experts_ns: list[int],
    ) -> None:
        """Record N ``layers`` of a batch, all of them that there are; one that was off is counted.

        ``tokens`` of the batch that each belongs to, ``stage_ns`` (N, stages).
        """
        decisions, rank = found.decision.tolist(), self._setup.location.rank
        if decisions[0] == Decision.POLICY_OFF:
            self._recorder.count_batch(Decision.POLICY_OFF)
            return
        if Decision.INCONSISTENT in decisions and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ids or loads differ between ranks; inconsistent batches are not balanced"
            )
        before, after = rank_loads(found)
        own, least = after[:, rank].tolist(), after.min(axis=1).tolist()
        self._own_time.add_batch(experts_ns, own, least)
        expert_bytes, copies = self._expert_bytes[layers], found.slot_expert >= 0
        columns = LayerRecord(
            batch=batch,
            bytes_sent=found.sent * expert_bytes,
            bytes_received=found.is_copied[:, rank].sum(axis=1) * expert_bytes,
            experts_ns=experts_ns,
            layer=layers,
            tokens=tokens,
            replicas=copies.reshape(len(layers), -1).sum(axis=1),
            decision=found.decision,
            policy=found.policy,
            stage_ns=stage_ns,
            load_before=before,
            load_after=after,
            speed=found.speed,
            slot_expert=found.slot_expert,
            is_copied=found.is_copied,
            slot_load=found.slot_load,
            expert_load=found.expert_load,
            own_load=found.own_load if self._is_own else 0,
        )
        self._recorder.record_batch(columns, len(layers))
