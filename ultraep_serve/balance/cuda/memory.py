"""Memory side by side in one range of addresses, undone in the right order however far it came."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ultraep_serve.balance.cuda.driver import Driver

__all__ = ["Allocation", "MappedMemory", "create", "host_words", "round_up"]


def host_words(size: int, device: torch.device) -> torch.Tensor:
    """Return (size,) int32 in host memory that ``device`` reads and writes too."""
    return torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")


@dataclass(frozen=True)
class Allocation:
    """Physical memory, of this process or imported."""

    handle: int
    size: int  # bytes


class MappedMemory:
    """Allocations, one after another, behind one range of addresses."""

    def __init__(self, driver: Driver, allocations: Sequence[Allocation]) -> None:
        """Map the allocations; the handles stay the caller's. Without any, address and size are 0.

        Raises what ``Driver`` raises, with everything undone.
        """
        self.address = 0
        self.size = sum(allocation.size for allocation in allocations)
        with ExitStack() as undo:
            if self.size:
                self.address = driver.reserve(self.size)
                undo.callback(driver.free, self.address, self.size)
                end = self.address
                for allocation in allocations:
                    driver.map(end, allocation.size, allocation.handle)
                    undo.callback(driver.unmap, end, allocation.size)
                    end += allocation.size
                driver.allow(self.address, self.size)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unmap everything, then free the range; nothing may use it any more."""
        self._undo.close()


def create(driver: Driver, size: int, undo: ExitStack) -> Allocation:
    """New memory of at least ``size`` bytes, released when ``undo`` is closed."""
    size = round_up(size, driver.granularity)
    handle = driver.create(size)
    undo.callback(driver.release, handle)
    return Allocation(handle, size)


def round_up(size: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit
