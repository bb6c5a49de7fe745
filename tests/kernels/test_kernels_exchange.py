"""exchange: several ranks' rows as plain buffers of one process."""

import numpy as np
import pytest
from ultraep_kernels.contract import FLAG_BYTES
from ultraep_kernels.host.exchange import gather_rows, post_row, wait_flags

RANKS, WIDTH = 3, 7


@pytest.fixture
def segments() -> list[np.ndarray]:
    """A flag with its cache line, and two rows, for each rank."""
    return [np.zeros(FLAG_BYTES // 8 + 2 * WIDTH, dtype=np.int64) for _ in range(RANKS)]


def flags_of(segments: list[np.ndarray]) -> np.ndarray:
    return np.array([segment.ctypes.data for segment in segments], dtype=np.int64)


def row_of(rank: int, epoch: int) -> np.ndarray:
    return np.arange(WIDTH, dtype=np.int64) + 1000 * epoch + 100 * rank


def post(segments: list[np.ndarray], rank: int, epoch: int) -> None:
    address = segments[rank].ctypes.data
    post_row(address, address + FLAG_BYTES, epoch, row_of(rank, epoch))


def test_a_fast_rank_does_not_overwrite_what_others_still_read(segments: list[np.ndarray]) -> None:
    flags = flags_of(segments)
    for rank in range(RANKS):
        post(segments, rank, 1)
    post(segments, 0, 2)  # the furthest that a rank can be ahead
    assert np.array_equal(gather_rows(flags + FLAG_BYTES, 1, WIDTH)[0], row_of(0, 1))
    assert wait_flags(flags, 2, 5) == 1


def test_waiting_is_for_the_slowest_rank(segments: list[np.ndarray]) -> None:
    flags = flags_of(segments)
    for rank in (1, 2):
        post(segments, rank, 1)
    assert wait_flags(flags, 1, 5) == 0
    post(segments, 0, 1)
    assert wait_flags(flags, 1, 5) == RANKS
