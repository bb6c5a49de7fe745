"""exchange: every rank's row of int64 -> all rows (R, W) on every rank, through shared memory.

``write_row`` packs a rank's load into a row, see ``contract`` for its header.

It is also the fence: a rank posts after its expert kernel of the layer before, so whoever has
seen the post may overwrite that rank's replica slots. Rows are kept twice, by parity of the
epoch: a rank posts epoch n + 2 only after everybody posted n + 1, hence finished reading n.
Twin: ``device.exchange``, where posting, waiting and gathering are one launch.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels import contract
from ultraep_kernels.contract import Choice
from ultraep_kernels.host._atomics import copy_bytes, load_acquire, store_release
from ultraep_kernels.host._compile import compiled


def write_row(
    load: NDArray[np.int64], unknown: int, choice: Choice, has_load: bool, doubt: bool = False
) -> NDArray[np.int64]:
    """This rank's row (W,) int64, W = HEADER_WIDTH, and E more where it has its ``load`` (E,).

    ``unknown`` ids could not be counted; ``doubt`` is this rank's, see ``contract``.
    """
    header = [0] * contract.HEADER_WIDTH
    header[contract.POLICY], header[contract.TIME], header[contract.FORGET] = choice
    header[contract.UNKNOWN], header[contract.CHECKSUM] = unknown, zlib.crc32(load.data)
    header[contract.DOUBT] = doubt
    row = np.array(header, dtype=np.int64)
    return np.concatenate((row, load)) if has_load else row


@compiled
def contradictions(rows: Any) -> tuple[bool, bool, bool]:
    """Of all ranks' ``rows`` (R, W): has one a doubt, or unknown ids, and do checksums differ."""
    doubt = unknown = differ = False
    for rank in range(rows.shape[0]):
        doubt |= rows[rank, contract.DOUBT] != 0
        unknown |= rows[rank, contract.UNKNOWN] != 0
        differ |= rows[rank, contract.CHECKSUM] != rows[0, contract.CHECKSUM]
    return doubt, unknown, differ


@compiled
def post_row(flag_address: int, rows_address: int, epoch: int, row: Any) -> None:
    """Publish ``row`` (W,) int64 as this rank's contribution to ``epoch``."""
    size = row.size * 8
    copy_bytes(rows_address + (epoch % 2) * size, row.ctypes.data, size)
    store_release(flag_address, epoch)


@compiled
def wait_flags(flag_addresses: Any, epoch: int, spins: int) -> int:
    """Look at most ``spins`` times until all flags reached ``epoch``; how many have (N = all)."""
    arrived = 0
    for _ in range(spins):
        while arrived < flag_addresses.size and load_acquire(flag_addresses[arrived]) >= epoch:
            arrived += 1
        if arrived == flag_addresses.size:
            break
    return arrived


@compiled
def gather_rows(rows_addresses: NDArray[np.int64], epoch: int, width: int) -> NDArray[np.int64]:
    """All ranks' rows (R, W) int64 of ``epoch``; every flag must have reached it."""
    out, size = np.empty((rows_addresses.size, width), np.int64), width * 8
    for rank in range(rows_addresses.size):
        copy_bytes(out[rank].ctypes.data, rows_addresses[rank] + (epoch % 2) * size, size)
    return out
