"""What every rank's host expects of a batch, from the batch before last.

The host launches without knowing what the device decides. What it launches must suit the other
ranks, so it goes by what all ranks know alike and need not wait for: the outcome of the last batch
may still be on its way to one of them, that of the one before is there.
"""

from collections.abc import Iterable

from ultraep_kernels.device.outcome import decision_of

from ultraep_serve.balance.cuda.recording import PendingLayer
from ultraep_serve.types import Decision

__all__ = ["Expectations"]

_STAYED = (Decision.BALANCED, Decision.UNPROFITABLE, Decision.INCONSISTENT)


class Expectations:
    """Of a batch that exchanges, alike on every rank."""

    def __init__(self) -> None:
        self.left_alone: set[tuple[int, int]] = set()  # layers and micro-batches
        self.rests = False  # whether its policy is off, so that only its first layer exchanges

    def learn(self, layers: Iterable[PendingLayer]) -> None:
        """Take the outcome of the batch before last; without ``layers`` nothing is known of it."""
        self.rests = False
        for pending in layers:
            place, decision = (pending.layer, pending.micro_batch), decision_of(pending.values)
            self.rests |= decision is Decision.POLICY_OFF
            if decision in _STAYED:
                self.left_alone.add(place)
            elif decision is not Decision.POLICY_OFF:
                self.left_alone.discard(place)
