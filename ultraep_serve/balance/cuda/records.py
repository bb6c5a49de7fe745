"""What came of layers, from their notes to the recorder."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.device.outcome import Outcome, unpack_outcome
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.recording import Note
from ultraep_serve.balance.physical import experts_sent
from ultraep_serve.balance.speeds import OwnTime
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage

__all__ = ["Records"]


class Records:
    """Writes the records of one rank, and knows what they say of the last batch."""

    def __init__(
        self,
        setup: GroupSetup,
        expert_bytes: list[int],
        recorder: Recorder,
        own_time: OwnTime,
        warn: Callable[[str], None],
    ) -> None:
        """``expert_bytes`` of one expert by layer; ``own_time`` learns how long experts took."""
        self._setup = setup
        self._expert_bytes = expert_bytes
        self._recorder = recorder
        self._own_time, self._timed_batch = own_time, 0
        self._warn = warn
        self._stage_ns: dict[int, tuple[int, list[int]]] = {}  # of a layer: tokens, times
        self.was_off = False  # the policy of the last batch known

    def write(self, note: Note) -> None:
        """One layer of one batch; a batch that was off is counted, once."""
        shape, rank = self._setup.shape, self._setup.location.rank
        sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        outcome = unpack_outcome(note.values, *sizes)
        decision = Decision(outcome.decision)
        if note.layer == note.micro_batch == 0:
            self.was_off = decision is Decision.POLICY_OFF
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
        domain = self._setup.location.domain_size
        parents = relay_parents(slots, shape.num_masters, self._setup.config.relay, domain)
        self._recorder.record(
            layer=note.layer,
            batch=note.batch,
            tokens=note.tokens,
            decision=decision,
            policy=list(Policy)[outcome.policy],
            replicas=int((slots >= 0).sum()),
            bytes_sent=experts_sent(rank, slots, parents, shape.num_masters) * expert_bytes,
            bytes_received=int((slots[rank] >= 0).sum()) * expert_bytes,
            stage_ns=self._stage_times(note),
            load_before=before,
            load_after=after,
            slot_expert=slots,
            slot_load=outcome.slot_load,
            expert_load=outcome.expert_load,
            speed=outcome.speeds,
            experts_ns=note.experts_ns,
        )

    def _stage_times(self, note: Note) -> list[int]:
        """Measured, or taken from the batch that last was, in proportion to tokens."""
        if note.is_timed:
            self._stage_ns[note.layer] = note.tokens, note.nanoseconds
        tokens, times = self._stage_ns.get(note.layer, (1, [0] * len(Stage)))
        return [time * note.tokens // tokens for time in times]


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
