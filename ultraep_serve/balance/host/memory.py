"""Address ranges of the C library, which Python's mmap module does not give: where, and why not."""

import ctypes
import mmap
import os

import torch

from ultraep_serve.errors import ConfigError

__all__ = [
    "MAP_FIXED",
    "READ_WRITE",
    "map_memory",
    "protect_memory",
    "shareable_memory",
    "tensor_at",
    "unmap_memory",
]

MAP_FIXED = 0x10  # not exposed by the mmap module
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

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
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def shareable_memory(name: str) -> int:
    """A file descriptor of memory without a name, which other processes can be given.

    Raises ConfigError where a sandbox refuses it.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"no memory can be shared between ranks: memfd_create is refused ({error.strerror}); "
            "allow it in the container's seccomp profile"
        ) from error


def map_memory(
    address: int, size: int, protection: int, flags: int, descriptor: int, offset: int = 0
) -> int:
    """mmap(2): where ``size`` bytes are mapped, 0 letting the kernel choose. Raises OSError."""
    result = _libc.mmap(address or None, size, protection, flags, descriptor, offset)
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


def protect_memory(address: int, size: int, protection: int) -> None:
    """mprotect(2) of ranges that are known to be mapped."""
    _libc.mprotect(address, size, protection)
