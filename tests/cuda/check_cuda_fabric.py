"""Slots, fabric and kernels together, between processes (run by test_interpreted).

Host memory stands in for the GPU's, descriptors of it travel over sockets: the kernels write other
processes' slots through imported mappings, and layers read them behind their masters.
"""

from pathlib import Path

import pytest
import torch

from tests.support.host_driver import HostDriver
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.cuda.rendezvous import SocketRendezvous
from ultraep_serve.cuda.slots import DeviceSlotPool
from ultraep_serve.errors import PeerTimeoutError

MASTERS, SLOTS, CHUNK, WIDTH, LAYERS = 2, 2, 16384, 11, 2
SHAPES = ((130, 128), (130,), (7,))  # mapped behind masters, packed, packed at odd addresses
PATIENCE_NS = 2_000_000_000


def masters_of(rank: int, layer: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + layer)
    return [torch.randn(MASTERS, *shape, generator=generator).bfloat16() for shape in SHAPES]


def slots_of(num_ranks: int, epoch: int) -> torch.Tensor:
    """(R, S): one expert of the first rank on all others, and some that go from hand to hand."""
    ranks = torch.arange(num_ranks, dtype=torch.int32)
    first = torch.where(ranks > 0, epoch % MASTERS, -1)
    second = (ranks + 1) % num_ranks * MASTERS + 1
    doubled = (second == first) | (second // MASTERS == ranks)
    return torch.stack([first, torch.where(doubled, -1, second)], dim=1).int()


def balance(rank: int, num_ranks: int, run_path: Path, mode: str, epochs: int) -> int:
    """Slots that were filled and right over all epochs."""
    driver = HostDriver()
    pool = DeviceSlotPool(driver, SLOTS, CHUNK)
    layers = [pool.adopt(masters_of(rank, layer)) for layer in range(LAYERS)]
    limits = Limits(WIDTH, layers[0].chunks.shape[0], PATIENCE_NS, num_programs=2)
    rendezvous = SocketRendezvous(run_path, rank, num_ranks, 60.0)
    fabric = DeviceFabric(driver, pool, rendezvous, rank, num_ranks, limits)
    tables = [fabric.tables(layer) for layer in layers]
    filled = 0
    for epoch in range(epochs):
        layer, row = epoch % LAYERS, torch.arange(WIDTH, dtype=torch.int32) + 100 * epoch
        rows = fabric.exchange(row + 1000 * rank)
        ranks = torch.arange(num_ranks, dtype=torch.int32)
        assert torch.equal(rows, row + 1000 * ranks[:, None])
        slot_expert = slots_of(num_ranks, epoch)
        fabric.stream(tables[layer], slot_expert, MASTERS, mode)
        fabric.wait_slots(tables[layer], slot_expert)
        fabric.require_peers()
        for slot, expert in enumerate(slot_expert[rank].tolist()):
            if expert >= 0:
                expected = masters_of(expert // MASTERS, layer)
                for alias, master in zip(layers[layer].tensors, expected, strict=True):
                    assert torch.equal(alias[MASTERS + slot], master[expert % MASTERS])
                filled += 1
        for alias, master in zip(layers[layer].tensors, masters_of(rank, layer), strict=True):
            assert torch.equal(alias[:MASTERS], master)
    fabric.exchange(torch.zeros(WIDTH, dtype=torch.int32))  # nobody leaves before the others
    fabric.close()
    pool.close()
    driver.require_clean()
    return filled


@pytest.mark.parametrize(("num_ranks", "mode"), [(1, "never"), (2, "never"), (4, "always")])
def test_experts_arrive_behind_the_masters_of_other_processes(num_ranks: int, mode: str) -> None:
    with fresh_run_path() as run_path:
        filled = run_ranks(balance, num_ranks, num_ranks, run_path, mode, 4, timeout_seconds=200.0)
    if num_ranks > 1:
        assert min(filled) > 0


def wait_for_nobody(rank: int, run_path: Path) -> str:
    """What rank 0 is told once rank 1, which it met, is gone."""
    driver = HostDriver()
    pool = DeviceSlotPool(driver, SLOTS, CHUNK)
    pool.adopt(masters_of(rank, 0))
    limits = Limits(WIDTH, 10, patience_ns=100_000, num_programs=1)
    fabric = DeviceFabric(driver, pool, SocketRendezvous(run_path, rank, 2, 60.0), rank, 2, limits)
    if rank == 0:
        fabric.exchange(torch.zeros(WIDTH, dtype=torch.int32))
        try:
            fabric.require_peers()
        except PeerTimeoutError as error:
            return str(error)
    return ""


def test_a_rank_that_is_gone_is_an_error() -> None:
    with fresh_run_path() as run_path:
        told = run_ranks(wait_for_nobody, 2, run_path)
    assert "gave up waiting for the load exchange" in told[0]
