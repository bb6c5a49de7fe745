"""One rank of many whose peers are itself, and have all posted what it will ever wait for.

For checking and measuring one rank's device balancer in one process; needs Triton. What this rank
sends lands in its own slots, so their bytes mean nothing.
"""

import os
from collections.abc import Sequence

import torch
from ultraep_kernels.contract import FLAG_BYTES
from ultraep_kernels.device.exchange import inbox_bytes

from ultraep_serve.cuda.driver import Driver, HandleKind, Shareable
from ultraep_serve.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.cuda.rendezvous import Handshake
from ultraep_serve.cuda.slots import DeviceSlotPool

__all__ = ["Mirror", "mirrored_fabric"]

POSTED = 1 << 40  # an epoch that nobody reaches


class Mirror:
    """A rendezvous whose other ranks are rank 0 itself, through descriptors of its own memory."""

    kind = HandleKind.FILE_DESCRIPTOR

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def swap(self, layout: bytes, shareables: Sequence[Shareable]) -> list[Handshake]:
        """As ``Rendezvous.swap``."""
        return [
            Handshake(layout, [os.dup(int(item)) for item in shareables if rank])
            for rank in range(self._num_ranks)
        ]


def mirrored_fabric(
    driver: Driver, pool: DeviceSlotPool, rows: torch.Tensor, limits: Limits
) -> DeviceFabric:
    """The fabric of rank 0, which finds ``rows`` (R, W) int32 of its peers in every exchange.

    Row 0 does not count: rank 0 posts its own.
    """
    num_ranks = rows.shape[0]
    fabric = DeviceFabric(driver, pool, Mirror(num_ranks), 0, num_ranks, limits)
    inbox = inbox_bytes(num_ranks, limits.row_width)
    signals = driver.tensor(int(fabric.inboxes[0]), inbox + pool.num_slots * limits.max_chunks * 8)
    ends = num_ranks * FLAG_BYTES
    signals[:ends].view(torch.int64).view(num_ranks, -1)[1:, 0] = POSTED
    signals[ends:inbox].view(torch.int32).view(2, num_ranks, -1)[:] = rows
    signals[inbox:].view(torch.int64)[:] = POSTED
    return fabric
