"""HostFabric between real processes: rows, layouts, and a typed error where a rank is missing."""

import ctypes
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.ranks import fresh_run_path, outcomes_of_ranks, run_ranks
from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.errors import PeerTimeoutError
from ultraep_serve.system.topology import Location

WIDTH, CHUNK = 12, 4096
LONG = 60.0  # seconds; a test that waits for this fails


def join(
    run_path: Path, rank: int, num_ranks: int, seconds: float = LONG, num_slots: int = 0
) -> HostFabric:
    """One rank, from whose masters nothing moves."""
    pool = SlotPool(HostMemory(), num_slots, CHUNK)
    return HostFabric(run_path, Location.on_one_host(rank, num_ranks), WIDTH, pool, 1, seconds)


@pytest.mark.parametrize(("num_ranks", "epochs"), [(2, 5000), (4, 1000), (8, 1000)])
def test_rows_of_thousands_of_epochs(run_path: Path, num_ranks: int, epochs: int) -> None:
    """Also between more ranks than there are cores."""
    assert run_ranks(exchange_many, num_ranks, num_ranks, run_path, epochs) == [0] * num_ranks
    assert list(run_path.iterdir()) == []


def test_ranks_that_let_nobody_look_into_them_share_memory(run_path: Path) -> None:
    run_ranks(exchange_many, 2, 2, run_path, 20)  # compiles what only this user may write
    run_path.chmod(0o777)
    assert run_ranks(exchange_hidden, 2, run_path) == [0, 0]


def exchange_hidden(rank: int, run_path: Path) -> int:
    """Wrong rows seen by a process as hardened containers make it."""
    if not os.getuid():  # who may look into every process
        os.setgid(65534)
        os.setuid(65534)
    set_dumpable = 4
    assert not ctypes.CDLL(None).prctl(set_dumpable, 0)
    assert Path("/proc/self/fd").stat().st_uid == 0  # so it is closed to the other rank
    return exchange_many(rank, 2, run_path, 20)


def exchange_many(rank: int, num_ranks: int, run_path: Path, epochs: int) -> int:
    """Wrong rows seen; rows of changing width, now and then a slow rank."""
    fabric = join(run_path, rank, num_ranks)
    rng = np.random.default_rng(rank)
    wrong = 0
    for epoch in range(epochs):
        width = 1 + epoch % WIDTH
        rows = fabric.exchange(row_of(rank, epoch, width))
        expected = [row_of(other, epoch, width) for other in range(num_ranks)]
        wrong += not np.array_equal(rows, expected)
        if rng.random() < 0.002:
            time.sleep(3e-3)
    fabric.close()
    return wrong


def row_of(rank: int, epoch: int, width: int) -> np.ndarray:
    return np.arange(width, dtype=np.int64) * 7 + epoch * 1_000_003 + rank * 101


def test_ranks_that_differ_in_their_layout_say_so(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(with_other_slots, 3, run_path)
    for outcome in outcomes:
        assert outcome.error == "FabricError"
        assert "laid out its slots unlike" in outcome.message


def with_other_slots(rank: int, run_path: Path) -> None:
    join(run_path, rank, 3, num_slots=3 if rank == 2 else 2)
    time.sleep(5)


def test_one_rank_alone_reads_its_own_row() -> None:
    with fresh_run_path() as run_path:
        fabric = join(run_path, 0, 1)
        assert fabric.exchange(row_of(0, 1, 3)).tolist() == [row_of(0, 1, 3).tolist()]
        with pytest.raises(ValueError, match="13 values"):
            fabric.exchange(np.zeros(WIDTH + 1, np.int64))
        fabric.close()
    assert not run_path.exists()


@pytest.mark.parametrize("victim", [0, 1], ids=["owner", "relay"])
def test_a_rank_killed_while_streaming_is_noticed(run_path: Path, victim: int) -> None:
    """Rank 0 owns the expert, rank 1 relays it to ranks 2 and 3."""
    outcomes = outcomes_of_ranks(die_in_stream, 4, victim, run_path, timeout_seconds=30)
    assert outcomes[victim].signal == signal.SIGKILL
    for rank in (2, 3):
        assert outcomes[rank].error == "PeerTimeoutError", outcomes[rank]
        assert "replicated experts" in outcomes[rank].message
    if victim == 0:
        assert outcomes[1].error == "PeerTimeoutError"
        assert "a relayed expert" in outcomes[1].message
    assert not multiprocessing.active_children()


def die_in_stream(rank: int, victim: int, run_path: Path) -> None:
    pool = SlotPool(HostMemory(), 1, CHUNK)
    layer = pool.adopt([torch.full((2, 50_000), rank, dtype=torch.uint8)])
    fabric = HostFabric(
        run_path, Location.on_one_host(rank, 4), WIDTH, pool, layer.chunks.shape[0], LONG
    )
    slot_expert = np.array([[-1], [0], [0], [0]], dtype=np.int32)
    parents = np.array([[-1], [-1], [1], [1]], dtype=np.int64)
    fabric.exchange(np.zeros(WIDTH, np.int64))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    fabric.stream(layer, slot_expert, parents, 2)
    fabric.wait_slots(layer, slot_expert)


def test_a_rank_that_does_not_come_is_an_error(run_path: Path) -> None:
    """After the time that loading has."""
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="rank 0 waited for rank 1, which did not come"):
        join(run_path, 0, 2, seconds=0.05)
    assert time.monotonic() - started >= 0.05 * CONNECT_FACTOR


@pytest.mark.parametrize("number", [0, signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_ends_after_its_last_exchange_is_not_missed(
    run_path: Path, number: int
) -> None:
    """Who has answered may go, however it does, while a slower one is still waited for."""
    outcomes = outcomes_of_ranks(leave_one_by_one, 3, run_path, number)
    assert [outcome.value for outcome in outcomes[1:]] == [5, 5]
    assert (outcomes[0].value, outcomes[0].signal) == (None if number else 5, number)


def leave_one_by_one(rank: int, run_path: Path, number: int) -> int:
    fabric = join(run_path, rank, 3)
    for _ in range(3):
        fabric.exchange(np.zeros(WIDTH, np.int64))
    if rank == 2:
        time.sleep(0.5)
    elif rank == 0:
        time.sleep(0.01)
    rows = fabric.exchange(np.full(WIDTH, 5, np.int64)) if rank else post_and_leave(fabric)
    if rank == 0 and number:
        os.kill(os.getpid(), number)
    return int(rows.max())


def post_and_leave(fabric: HostFabric) -> np.ndarray:
    from ultraep_kernels.host.exchange import post_row

    row = np.full(WIDTH, 5, np.int64)
    post_row(int(fabric._flags[0]), int(fabric._rows[0]), fabric.epoch + 1, row)
    return row
