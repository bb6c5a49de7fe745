"""CUDA's virtual memory API played on host memory, for machines without a GPU.

Memory really is mapped, several times and across processes, so everything built on the ``Driver``
protocol runs on it. Every rule of the real thing that can be checked is checked, and any call can
be made to fail.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass, field

import torch

from ultraep_serve.balance.cuda.driver import device_error
from ultraep_serve.balance.host.memory import (
    MAP_FIXED,
    READ_WRITE,
    HostMemory,
    map_memory,
    unmap_memory,
)
from ultraep_serve.balance.memory import HandleKind, Shareable
from ultraep_serve.errors import UnsupportedError

_NO_ACCESS = 0
_mprotect = ctypes.CDLL(None).mprotect
_FABRIC_BYTES = 64


@dataclass
class _Memory:
    """What a handle stands for."""

    descriptor: int
    size: int


@dataclass
class HostDriver(HostMemory):
    """``Driver`` over host memory; AssertionError where CUDA's rules are broken."""

    kind: HandleKind = HandleKind.FILE_DESCRIPTOR
    granularity: int = 1 << 16  # a multiple of the page size
    fail_at: int = 0  # the call that fails, counted from 1; 0 none
    error: str = "CUDA_ERROR_OUT_OF_MEMORY"  # that it fails with
    calls: list[str] = field(default_factory=list)  # those that may fail
    reserved: dict[int, int] = field(default_factory=dict)  # address: size
    handles: dict[int, _Memory] = field(default_factory=dict)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address: size, which memory
    allowed: set[int] = field(default_factory=set)  # addresses of mappings
    uuid: str = "host"
    unreachable: set[str] = field(default_factory=set)  # UUIDs of other devices
    _next_handle: int = 1

    @property
    def live_bytes(self) -> int:
        """Bytes behind handles that were not released."""
        return sum(memory.size for memory in self.handles.values())

    def require_clean(self) -> None:
        """AssertionError unless everything was given back."""
        assert not self.mapped, f"still mapped: {self.mapped}"
        assert not self.handles, f"not released: {self.handles}"
        assert not self.reserved, f"not freed: {self.reserved}"
        assert not self.allowed

    def reserve(self, size: int) -> int:
        self._enter("reserve", size)
        whole = size + self.granularity
        start = map_memory(0, whole, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        address = -(-start // self.granularity) * self.granularity
        if address > start:
            unmap_memory(start, address - start)
        if (tail := start + whole - address - size) > 0:
            unmap_memory(address + size, tail)
        self.reserved[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        assert self.reserved.pop(address, None) == size, "no such range, or of another size"
        inside = [start for start in self.mapped if address <= start < address + size]
        assert not inside, "freed while memory is mapped in it"
        super().free(address, size)

    def create(self, size: int, is_shared: bool = True) -> int:
        self._enter("create", size)
        return self._hold(super().create(size), size)

    def release(self, handle: int) -> None:
        assert handle in self.handles, "released twice, or never created"
        os.close(self.handles.pop(handle).descriptor)

    def map(self, address: int, size: int, handle: int) -> None:
        self._enter("map", size)
        assert address % self.granularity == 0
        assert self.handles[handle].size == size, "mapped in part"
        end = address + size
        assert any(
            start <= address and end <= start + length for start, length in self.reserved.items()
        ), "not reserved"
        assert all(
            end <= start or start + length <= address for start, (length, _) in self.mapped.items()
        ), "mapped twice"
        flags = mmap.MAP_SHARED | MAP_FIXED
        descriptor = self.handles[handle].descriptor
        map_memory(address, size, _NO_ACCESS, flags, descriptor)
        self.mapped[address] = (size, os.fstat(descriptor).st_ino)

    def unmap(self, address: int, size: int) -> None:
        assert address in self.mapped, "unmapped twice, or never mapped"
        assert self.mapped.pop(address)[0] == size
        self.allowed.discard(address)
        super().unmap(address, size)

    def allow(self, address: int, size: int) -> None:
        self._enter("allow", size)
        inside = self._pieces(address, size)
        assert sum(self.mapped[start][0] for start in inside) == size, "not mapped all through"
        _mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), READ_WRITE)
        self.allowed.update(inside)

    def require_peer(self, uuid: str, rank: int) -> None:
        if uuid in self.unreachable:
            raise UnsupportedError(f"no peer access to rank {rank}")

    def share(self, handle: int) -> Shareable:
        self._enter("share", 0)
        descriptor = self.handles[handle].descriptor
        if self.kind is HandleKind.FILE_DESCRIPTOR:
            return os.dup(descriptor)
        return f"{os.getpid()}/fd/{descriptor}".encode().ljust(_FABRIC_BYTES, b"\0")

    def receive(self, shareable: Shareable) -> int:
        self._enter("receive", 0)
        if isinstance(shareable, int):
            assert self.kind is HandleKind.FILE_DESCRIPTOR
            descriptor = os.dup(shareable)
        else:
            assert self.kind is HandleKind.FABRIC
            assert len(shareable) == _FABRIC_BYTES
            descriptor = os.open(f"/proc/{shareable.rstrip(bytes(1)).decode()}", os.O_RDWR)
        return self._hold(descriptor, os.fstat(descriptor).st_size)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        assert size > 0
        pieces = [
            start
            for start, (length, _) in self.mapped.items()
            if start < address + size and address < start + length
        ]
        assert pieces, "nothing is mapped there"
        assert self.allowed.issuperset(pieces), "access was not allowed"
        assert min(pieces) <= address
        assert address + size <= min(pieces) + sum(self.mapped[start][0] for start in pieces)
        return super().tensor(address, size)

    def _enter(self, call: str, size: int) -> None:
        assert size % self.granularity == 0, f"{call} of {size} bytes"
        self.calls.append(call)
        if len(self.calls) == self.fail_at:
            raise device_error(call, self.error)

    def _pieces(self, address: int, size: int) -> list[int]:
        return [start for start in self.mapped if address <= start < address + size]

    def _hold(self, descriptor: int, size: int) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self.handles[handle] = _Memory(descriptor, size)
        return handle
