"""Memory of the host that several ranks map, through calls of the C library."""

import ctypes
import mmap
import os

import torch

from ultraep_serve.balance.memory import Driver, HandleKind, Shareable
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.machine import available_memory

MAP_FIXED = 0x10  # not exposed by the mmap module
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_NO_ACCESS = 0
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_NOT_SHARED = -1  # the handle of memory that no other process maps

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostMemory(Driver):
    """``Driver`` over memory of the host without a name; a handle is a file descriptor."""

    device = torch.device("cpu")
    kind = HandleKind.FILE_DESCRIPTOR
    granularity = mmap.PAGESIZE

    def reserve(self, size: int) -> int:
        return _map(0, size, _NO_ACCESS, _PRIVATE, -1)

    def free(self, address: int, size: int) -> None:
        unmap_memory(address, size)

    def create(self, size: int, is_shared: bool = True) -> int:
        if not is_shared:  # only such memory has large pages without being asked for
            return _NOT_SHARED
        available = available_memory()
        if available is not None and size > available:
            raise ConfigError(
                f"replica slots need {size / 2**20:.0f} MiB, {available / 2**20:.0f} MiB are free; "
                "use fewer --slots"
            )
        try:
            handle = os.memfd_create("ultraep", os.MFD_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                "no memory can be shared between ranks: memfd_create is refused "
                f"({error.strerror}); allow it in the container's seccomp profile"
            ) from error
        os.ftruncate(handle, size)
        return handle

    def release(self, handle: int) -> None:
        if handle != _NOT_SHARED:
            os.close(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        flags = _PRIVATE if handle == _NOT_SHARED else mmap.MAP_SHARED
        _map(address, size, READ_WRITE, flags | MAP_FIXED, handle)

    def unmap(self, address: int, size: int) -> None:
        _map(address, size, _NO_ACCESS, _PRIVATE | MAP_FIXED, -1)

    def share(self, handle: int) -> Shareable:
        return os.dup(handle)

    def receive(self, shareable: Shareable) -> int:
        return os.dup(int(shareable))

    def tensor(self, address: int, size: int) -> torch.Tensor:
        return tensor_at(address, size, torch.uint8)


def _map(address: int, size: int, protection: int, flags: int, descriptor: int) -> int:
    try:
        return map_memory(address, size, protection, flags, descriptor)
    except OSError as error:
        raise ConfigError(
            f"cannot map {size} bytes for replica slots: {error.strerror}; use fewer slots"
        ) from error


def map_memory(address: int, size: int, protection: int, flags: int, descriptor: int) -> int:
    """mmap(2): where ``size`` bytes are mapped, 0 letting the kernel choose. Raises OSError."""
    result = _libc.mmap(address or None, size, protection, flags, descriptor, 0)
    if result == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def tensor_at(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The ``size`` bytes at ``address``, which stay mapped, as a tensor (N,)."""
    window = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(window, dtype=torch.uint8).view(dtype)


def unmap_memory(address: int, size: int) -> None:
    """munmap(2) of ranges that are known to be mapped."""
    _libc.munmap(address, size)
