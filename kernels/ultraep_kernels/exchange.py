"""exchange: every rank's row of int64 -> all rows (R, W) on every rank, through shared memory.

It is also the fence: a rank posts after its expert kernel of the layer before, so whoever has
seen the post may overwrite that rank's replica slots. Rows are kept twice, by parity of the
epoch: a rank posts epoch n + 2 only after everybody posted n + 1, hence finished reading n.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ultraep_kernels._atomics import copy_bytes, load_acquire, store_release

__all__ = ["FLAG_BYTES", "gather_rows", "post_row", "wait_flags"]

FLAG_BYTES = 64  # a flag has a cache line of its own


@njit(cache=True, nogil=True)
def post_row(flag_address: int, rows_address: int, epoch: int, row: Any) -> None:
    """Publish ``row`` (W,) int64 as this rank's contribution to ``epoch``."""
    size = row.size * 8
    copy_bytes(rows_address + (epoch % 2) * size, row.ctypes.data, size)
    store_release(flag_address, epoch)


@njit(cache=True, nogil=True)
def wait_flags(flag_addresses: Any, epoch: int, spins: int) -> int:
    """Look at most ``spins`` times until all flags reached ``epoch``; how many have (N = all)."""
    arrived = 0
    for _ in range(spins):
        while arrived < flag_addresses.size and load_acquire(flag_addresses[arrived]) >= epoch:
            arrived += 1
        if arrived == flag_addresses.size:
            break
    return arrived


@njit(cache=True, nogil=True)
def _gather_kernel(rows_addresses: Any, epoch: int, out: Any) -> None:
    size = out.shape[1] * 8
    for rank in range(rows_addresses.size):
        copy_bytes(out[rank].ctypes.data, rows_addresses[rank] + (epoch % 2) * size, size)


def gather_rows(rows_addresses: NDArray[np.int64], epoch: int, width: int) -> NDArray[np.int64]:
    """All ranks' rows (R, W) int64 of ``epoch``; every flag must have reached it."""
    out = np.empty((rows_addresses.size, width), dtype=np.int64)
    _gather_kernel(rows_addresses, epoch, out)
    return out
