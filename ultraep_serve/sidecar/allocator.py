"""Memory that was freed goes back: settings of glibc's allocator for a process of a few threads."""

import contextlib
import ctypes

__all__ = ["give_memory_back"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGE_BYTES = 2 << 20
_KEPT_BYTES = 16 << 20  # free at the heap's end, so that it need not grow again at once


def give_memory_back() -> None:
    """Map large arrays one by one, and share one heap among threads; only glibc is told.

    By default the first large array freed makes all later ones come from the heap of whichever
    thread asks, and those heaps keep the most they ever had.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
