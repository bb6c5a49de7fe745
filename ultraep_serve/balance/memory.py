"""Memory that several ranks map: what a driver of it does, and ranges with memory side by side.

A ``Driver`` has the calls of CUDA's virtual memory API that slots and fabrics are made of.
``cuda.driver`` makes them on a GPU, ``host.memory`` on the host.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import torch

Shareable: TypeAlias = int | bytes  # a file descriptor, or the 64 bytes of a fabric handle


class HandleKind(Enum):
    """What memory is shared by."""

    FILE_DESCRIPTOR = "file descriptors"  # between processes of one host
    FABRIC = "fabric handles"  # between hosts of one NVLink domain, where IMEX runs


class Driver(Protocol):
    """Memory of one device, or of the host.

    Addresses and sizes are bytes, sizes multiples of ``granularity``.
    What returns here is not called for on the host.
    Every call raises ConfigError when memory is short, UnsupportedError for what this device or
    its set-up does not offer, DeviceError otherwise; on a GPU all name the CUDA error.
    """

    device: torch.device
    kind: HandleKind  # the kind of all handles that are created
    granularity: int  # bytes
    uuid: str = ""  # the device's, the same in every process

    def require_peer(self, uuid: str, rank: int) -> None:
        """Raise UnsupportedError unless this device reaches the memory of ``rank``'s.

        One that this process does not see cannot be asked about, and is taken to be within reach.
        """
        return

    def reserve(self, size: int) -> int:
        """Address of a range with nothing behind it, a multiple of the granularity."""

    def free(self, address: int, size: int) -> None:
        """Give back a range that ``reserve`` returned; nothing may be mapped in it."""

    def create(self, size: int, is_shared: bool = True) -> int:
        """Handle of new memory, which can be shared where it ``is_shared``."""

    def release(self, handle: int) -> None:
        """Give up a handle; the memory lives on as long as it is mapped or held elsewhere."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Put all of a handle's memory behind a reserved range; it may be mapped many times."""

    def unmap(self, address: int, size: int) -> None:
        """Undo ``map``."""

    def allow(self, address: int, size: int) -> None:
        """Let this device read and write a mapped range."""
        return

    def share(self, handle: int) -> Shareable:
        """What another process imports; a descriptor must be closed by whoever holds it."""

    def receive(self, shareable: Shareable) -> int:
        """Handle of memory that another process shared; a descriptor stays the caller's."""

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """The bytes at a mapped address, (size,) uint8, without copying; ``size`` at least 1."""

    def synchronize(self) -> None:
        """Return when the device has done all it was told."""
        return

    def reclaim(self) -> None:
        """Hand memory that torch keeps for later back to the device, after ``synchronize``."""
        return


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


def create(driver: Driver, size: int, undo: ExitStack, is_shared: bool = True) -> Allocation:
    """New memory of at least ``size`` bytes, released when ``undo`` is closed."""
    size = round_up(size, driver.granularity)
    handle = driver.create(size, is_shared)
    undo.callback(driver.release, handle)
    return Allocation(handle, size)


def round_up(size: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit
