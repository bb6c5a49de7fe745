"""HostFabric between real processes: exchange, streaming, relays, layouts."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ultraep_kernels.host.relays import relay_parents

from tests.support.moe import poison
from tests.support.ranks import fresh_run_path, outcomes_of_ranks, run_ranks
from ultraep_serve.balance.backend import LayerSlots
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.system.topology import Location

WIDTH, MASTERS, SLOTS, CHUNK = 12, 3, 2, 4096
SIZES = (5000, 77)  # bytes per expert of two tensors


def no_slots() -> SlotPool:
    return SlotPool(HostMemory(), 0, CHUNK)


def test_rows_of_thousands_of_epochs(run_path: Path) -> None:
    assert run_ranks(exchange_many, 2, 2, run_path, 5000) == [0, 0]
    assert list(run_path.iterdir()) == []


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_rows_between_more_ranks_than_cores(run_path: Path, num_ranks: int) -> None:
    assert run_ranks(exchange_many, num_ranks, num_ranks, run_path, 1000) == [0] * num_ranks
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


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_slots_hold_their_masters_bytes_when_awaited(
    run_path: Path, num_ranks: int, mode: str
) -> None:
    corrupt, filled = zip(
        *run_ranks(stream_many, num_ranks, num_ranks, run_path, mode, 400 // num_ranks), strict=True
    )
    assert sum(corrupt) == 0
    assert min(filled) > 0


def stream_many(
    rank: int, num_ranks: int, run_path: Path, mode: str, epochs: int
) -> tuple[int, int]:
    """(slots with wrong bytes, slots awaited) over epochs with random plans."""
    pool = SlotPool(HostMemory(), SLOTS, CHUNK)
    layers = [pool.adopt(masters_of(rank, layer)) for layer in range(2)]
    everyone = [[masters_of(other, layer) for other in range(num_ranks)] for layer in range(2)]
    fabric = make_fabric(rank, num_ranks, run_path, pool, layers)
    corrupt = filled = 0
    for epoch in range(epochs):
        layer = epoch % 2
        poison(layers[layer].tensors, MASTERS)
        fabric.exchange(np.zeros(WIDTH, np.int64))
        slot_expert = random_slots(np.random.default_rng(epoch), num_ranks)
        parents = relay_parents(slot_expert, MASTERS, mode)
        fabric.stream(layers[layer], slot_expert, parents, MASTERS)
        fabric.wait_slots(layers[layer], slot_expert)
        for slot, expert in enumerate(slot_expert[rank]):
            if expert >= 0:
                filled += 1
                master = [t[expert % MASTERS] for t in everyone[layer][expert // MASTERS]]
                here = [t[MASTERS + slot] for t in layers[layer].tensors]
                corrupt += not all(torch.equal(a, b) for a, b in zip(here, master, strict=True))
    fabric.exchange(np.zeros(WIDTH, np.int64))
    return corrupt, filled


def make_fabric(
    rank: int, num_ranks: int, run_path: Path, pool: SlotPool, layers: list[LayerSlots]
) -> HostFabric:
    max_chunks = layers[0].chunks.shape[0]
    return HostFabric(
        run_path, Location.on_one_host(rank, num_ranks), WIDTH, pool, max_chunks, 20.0
    )


def masters_of(rank: int, layer: int) -> list[torch.Tensor]:
    rng = np.random.default_rng((rank, layer))
    return [
        torch.from_numpy(rng.integers(0, 256, (MASTERS, size), dtype=np.uint8)) for size in SIZES
    ]


def random_slots(rng: np.random.Generator, num_ranks: int) -> np.ndarray:
    """(R, S) of few hot experts, so that relays have something to do; some slots empty."""
    hot = rng.permutation(num_ranks * MASTERS)[: SLOTS + 1]
    slot_expert = np.full((num_ranks, SLOTS), -1, dtype=np.int32)
    for rank in range(num_ranks):
        candidates = [expert for expert in hot if expert // MASTERS != rank]
        chosen = candidates[:SLOTS]
        slot_expert[rank, : len(chosen)] = chosen
    slot_expert[rng.random(slot_expert.shape) < 0.1] = -1
    return slot_expert


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
