"""HostFabric between real processes: exchange and layouts."""

import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks import fresh_run_path, outcomes_of_ranks, run_ranks
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.system.topology import Location

WIDTH, CHUNK = 12, 4096


def no_slots() -> SlotPool:
    return SlotPool(HostMemory(), 0, CHUNK)


@pytest.mark.parametrize(("num_ranks", "epochs"), [(2, 5000), (4, 1000), (8, 1000)])
def test_rows_of_thousands_of_epochs(run_path: Path, num_ranks: int, epochs: int) -> None:
    """Also between more ranks than there are cores."""
    assert run_ranks(exchange_many, num_ranks, num_ranks, run_path, epochs) == [0] * num_ranks
    assert list(run_path.iterdir()) == []


def exchange_many(rank: int, num_ranks: int, run_path: Path, epochs: int) -> int:
    """Wrong rows seen; rows of changing width, now and then a slow rank."""
    fabric = HostFabric(
        run_path,
        Location.on_one_host(rank, num_ranks),
        WIDTH,
        no_slots(),
        0,
        20.0,
    )
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
    pool = SlotPool(HostMemory(), 3 if rank == 2 else 2, CHUNK)
    HostFabric(run_path, Location.on_one_host(rank, 3), WIDTH, pool, 1, 5.0)
    time.sleep(5)


def test_one_rank_alone_reads_its_own_row() -> None:
    with fresh_run_path() as run_path:
        fabric = HostFabric(run_path, Location.on_one_host(0, 1), WIDTH, no_slots(), 0, 5.0)
        assert fabric.exchange(row_of(0, 1, 3)).tolist() == [row_of(0, 1, 3).tolist()]
        with pytest.raises(ValueError, match="13 values"):
            fabric.exchange(np.zeros(WIDTH + 1, np.int64))
        fabric.close()
    assert not run_path.exists()
