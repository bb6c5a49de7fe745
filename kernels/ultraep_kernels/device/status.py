"""What kernels leave in words of the device: decisions, and in the status word what went wrong.

The status is one int32. Kernels set its bits and never clear them. Once a bit of a wait is set,
later waits give up at once, and the launch that awaits a layer's slots ends all work on the device
(``stream``).
"""

from enum import IntFlag

import torch
import triton.language as tl

from ultraep_kernels.contract import Decision

PLANNED, FORCED = tl.constexpr(int(Decision.PLANNED)), tl.constexpr(int(Decision.FORCED))
POLICY_OFF = tl.constexpr(int(Decision.POLICY_OFF))
BALANCED = tl.constexpr(int(Decision.BALANCED))
INCONSISTENT = tl.constexpr(int(Decision.INCONSISTENT))
UNPROFITABLE = tl.constexpr(int(Decision.UNPROFITABLE))


class DeviceStatus(IntFlag):
    """Bits of the status word."""

    OK = 0
    EXCHANGE_TIMEOUT = 1  # a rank did not post its row in time
    RELAY_TIMEOUT = 2  # a chunk to forward did not arrive in time
    SLOT_TIMEOUT = 4  # a replica slot was not filled in time
    SHARE_TOO_SMALL = 8  # more assignments than the share accounts for; they went to the master
    IMPOSSIBLE_LOADS = 16  # negative, or more than the planner counts: it planned the identity


EXCHANGE_TIMEOUT = tl.constexpr(int(DeviceStatus.EXCHANGE_TIMEOUT))
RELAY_TIMEOUT = tl.constexpr(int(DeviceStatus.RELAY_TIMEOUT))
SLOT_TIMEOUT = tl.constexpr(int(DeviceStatus.SLOT_TIMEOUT))
TIMEOUTS = tl.constexpr(int(EXCHANGE_TIMEOUT.value | RELAY_TIMEOUT.value | SLOT_TIMEOUT.value))
SHARE_TOO_SMALL = tl.constexpr(int(DeviceStatus.SHARE_TOO_SMALL))
IMPOSSIBLE_LOADS = tl.constexpr(int(DeviceStatus.IMPOSSIBLE_LOADS))


def new_status(device: torch.device | str) -> torch.Tensor:
    """A status word that says all is well, int32 (1,)."""
    return torch.zeros(1, dtype=torch.int32, device=device)
