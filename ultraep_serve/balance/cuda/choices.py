"""What a rank's host says of a batch and expects of it, before the device decides.

Its own choice goes to the others with the first exchange of the batch. What it launches must suit
the other ranks, so it goes by what all ranks know alike and need not wait for: the outcome of the
last batch may still be on its way to one of them, that of the one before is there.
"""

import numpy as np
import torch
from ultraep_kernels.contract import Choice, Outcome

from ultraep_serve.balance.cuda.driver import host_words
from ultraep_serve.balance.cuda.pages import LayerRow
from ultraep_serve.balance.own_time import OwnTime
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Decision, Policy

_ASKED = Choice._fields.index("changes")  # words before it
_LARGEST = np.iinfo(np.int32).max
_OFF = Decision.POLICY_OFF.value


class OwnChoice:
    """The policy that is asked for, where this is rank 0; what it measured, what has changed."""

    def __init__(
        self, policies: ControlPage | None, own_time: OwnTime, device: torch.device
    ) -> None:
        """``policies`` is rank 0's; other ranks choose nothing."""
        self._policies, self._own_time = policies, own_time
        self.on_device = torch.zeros(len(Choice._fields), dtype=torch.int32, device=device)
        # The host writes its choice whenever it likes; the device takes it where a batch begins.
        self.asked = host_words(_ASKED, device)
        self._words, self._taken = self.asked.numpy(), self.on_device[:_ASKED]

    def write(self) -> None:
        policy = Policy.OFF if self._policies is None else self._policies.policy
        picoseconds = min(self._own_time.picoseconds, _LARGEST)
        self._words[:] = Choice(policy.code, picoseconds)[:_ASKED]

    def forget(self) -> None:
        """Have layers that exchange after this, in stream order, forget what stayed until then."""
        self.on_device[_ASKED:].add_(1)

    def send(self) -> None:
        """Copy to the device, in stream order, what is written down by then."""
        self._taken.copy_(self.asked, non_blocking=True)


class Expectations:
    """Of a batch that exchanges, alike on every rank."""

    def __init__(self) -> None:
        self.without_copies: set[tuple[int, int]] = set()  # layers and micro-batches
        self.rests = False  # whether its policy is off, so that only its first layer exchanges

    def learn(self, rows: list[LayerRow], found: Outcome) -> None:
        """Take what came of the batch before last; without layers nothing is known of it."""
        self.rests = bool((found.decision == _OFF).any())
        if self.rests:
            return
        for row, is_copied in zip(rows, found.is_copied, strict=True):
            change = self.without_copies.discard if is_copied.any() else self.without_copies.add
            change((row.layer, row.micro_batch))

    def copies_nothing(self, layer: int, micro_batch: int) -> bool:
        """Whether the device is expected to copy nothing for the layer.

        Then one launch plans and does all that may follow. Where it turns out otherwise that is all
        done, but experts are sent before dispatch, not beside it. Ranks must expect the same: one
        whose experts come before its dispatch waits for others' side streams, which their own
        dispatch, waiting for it, should not keep from running.
        """
        return self.rests or (layer, micro_batch) in self.without_copies
