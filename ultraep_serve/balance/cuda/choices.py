"""What this rank tells the others with the first exchange of a batch."""

import numpy as np
import torch
from ultraep_kernels.contract import Choice

from ultraep_serve.balance.backend import PolicySource
from ultraep_serve.balance.cuda.driver import host_words
from ultraep_serve.balance.speeds import OwnTime

__all__ = ["OwnChoice"]

_LARGEST = np.iinfo(np.int32).max


class OwnChoice:
    """The policy that is asked for, where this is rank 0, and what it measured."""

    def __init__(
        self,
        policies: PolicySource | None,
        own_time: OwnTime,
        device: torch.device,
    ) -> None:
        """``policies`` is rank 0's; other ranks choose nothing."""
        self._policies, self._own_time = policies, own_time
        # The host writes its choice whenever it likes; the device takes it where a batch begins.
        self.on_device = torch.zeros(len(Choice._fields), dtype=torch.int32, device=device)
        self.asked = host_words(len(Choice._fields), device)
        self._words = self.asked.numpy()

    def write(self) -> None:
        """Write down what holds now."""
        time = min(self._own_time.picoseconds, _LARGEST)
        if self._policies is None:
            self._words[:] = Choice(time=time)
            return
        policy = self._policies.policy
        self._words[:] = Choice(policy.code, self._policies.speeds.code, time)

    def send(self) -> None:
        """Copy to the device, in stream order, what is written down by then."""
        self.on_device.copy_(self.asked, non_blocking=True)
