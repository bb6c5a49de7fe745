"""Slots and fabric on a device: alone, between processes, and where one of these dies.

They run on a GPU, and where there is none (a dry run) in host memory, between whose
processes descriptors of it travel. All checks raise AssertionError where something is wrong.
"""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ultraep_kernels.device.stream import Programs

from tests.support.bench import Bench
from tests.support.host_driver import HostDriver
from tests.support.kernel_checks import require_equal
from tests.support.ranks import fresh_run_path, outcomes_of_ranks, run_ranks
from ultraep_serve.balance.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.balance.memory import Driver
from ultraep_serve.balance.rendezvous import SocketRendezvous
from ultraep_serve.balance.slots import ALIGNMENT, LayerSlots, SlotPool
from ultraep_serve.errors import PeerTimeoutError
from ultraep_serve.system.topology import Location

LAYERS, SLOTS = 2, 2
RANKS, WIDTH = 4, 64
MODES = ("always", "never")  # relays, by epoch
VICTIM = 1


@dataclass(frozen=True)
class ExpertSizes:
    """The experts of one rank."""

    masters: int  # L
    hidden: int
    intermediate: int
    tokens: int  # of one expert
    chunk_bytes: int

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Both weights, FP8 block scales, and a bias, packed at addresses that are not aligned."""
        return (
            ((2 * self.intermediate, self.hidden), torch.bfloat16),
            ((self.hidden, self.intermediate), torch.bfloat16),
            ((2 * self.intermediate // 16, self.hidden // 16), torch.float32),
            ((3,), torch.bfloat16),
        )

    def layer(self, seed: int, device: torch.device) -> list[torch.Tensor]:
        """One layer's masters (L, ...), always the same for a seed."""
        generator = torch.Generator(device).manual_seed(seed)
        return [
            torch.empty((self.masters, *shape), dtype=dtype, device=device).normal_(
                generator=generator
            )
            for shape, dtype in self.shapes
        ]


@dataclass(frozen=True)
class GroupSizes:
    """What ``RANKS`` processes on one device do."""

    experts: ExpertSizes
    epochs: int
    num_programs: int
    patience_ns: int  # while all live: processes share the device in turns
    patience_at_death_ns: int
    seconds: float  # for all processes to end


def check_slots(bench: Bench, sizes: ExpertSizes) -> dict[str, Any]:
    """Two layers adopted: their masters, what lies behind them, and an unmodified grouped GEMM."""
    driver = bench.driver()
    pool = SlotPool(driver, SLOTS, sizes.chunk_bytes)
    layers, used = [], []
    for seed in range(LAYERS):
        masters = sizes.layer(seed, driver.device)
        before = _free_bytes(driver)
        layers.append(pool.adopt(masters))
        used.append(before - _free_bytes(driver))
        for alias, master in zip(layers[-1].tensors, sizes.layer(seed, driver.device), strict=True):
            assert alias.data_ptr() % ALIGNMENT == 0, "not aligned"
            assert torch.equal(alias[: sizes.masters], master), "masters changed"
    for tensor in range(2):
        _require_same_slots(sizes.masters, *(layer.tensors[tensor] for layer in layers))
    for expert in range(sizes.masters):
        for alias in layers[0].tensors:
            alias[sizes.masters + 1].copy_(alias[expert])
        for weight in layers[0].tensors[:2]:
            _require_equal_products(sizes, weight, expert, sizes.masters + 1)
    figures = {
        "granularity": driver.granularity,
        "expert_bytes": layers[0].bytes_per_expert,
        "pool_bytes": pool.size,
        "memory_used_by_layer": used,  # the first one's holds the pool
    }
    pool.close()
    return figures


def check_processes(sizes: GroupSizes) -> list[int]:
    """How many slots of each rank were filled, all of them with their masters' bytes."""
    with fresh_run_path() as run_path:
        filled = run_ranks(_fill, RANKS, run_path, sizes, timeout_seconds=sizes.seconds)
    assert min(filled) > 0, f"{filled = }"
    return filled


def check_death(sizes: GroupSizes) -> str:
    """What the other ranks are told once one of them is killed between two layers."""
    with fresh_run_path() as run_path:
        ended = outcomes_of_ranks(_outlive, RANKS, run_path, sizes, timeout_seconds=sizes.seconds)
    assert ended[VICTIM].signal == signal.SIGKILL, f"{ended[VICTIM] = }"
    told = [str(outcome.value) for rank, outcome in enumerate(ended) if rank != VICTIM]
    assert all("gave up waiting for the load exchange" in text for text in told), f"{ended = }"
    return told[0]


def _fill(rank: int, run_path: Path, sizes: GroupSizes) -> int:
    """Slots that were filled over all epochs, every one of them right; a process of its own."""
    member = _Member.join(rank, run_path, sizes)
    filled = sum(member.balance(epoch) for epoch in range(sizes.epochs))
    member.exchange(sizes.epochs)  # nobody leaves before all have read their slots
    member.fabric.close()
    member.pool.close()
    if isinstance(member.driver, HostDriver):
        member.driver.require_clean()
    return filled


def _outlive(rank: int, run_path: Path, sizes: GroupSizes) -> str:
    """What a rank is told once VICTIM, which lived for an epoch, is gone."""
    member = _Member.join(rank, run_path, sizes)
    member.balance(0)
    if rank == VICTIM:
        member.exchange(1)  # whatever it owed to the others is there
        member.driver.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    member.exchange(1)
    member.fabric.require_peers()
    patience = sizes.patience_at_death_ns
    member.fabric.limits = replace(member.fabric.limits, patience_ns=patience)
    member.fabric.wait_at_least(0)
    member.exchange(2)
    try:
        member.fabric.require_peers()
    except PeerTimeoutError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _Member:
    """One rank with a few layers."""

    rank: int
    experts: ExpertSizes
    pool: SlotPool
    layers: list[LayerSlots]
    fabric: DeviceFabric
    driver: Driver

    @classmethod
    def join(cls, rank: int, run_path: Path, sizes: GroupSizes) -> "_Member":
        """Returns once all ranks have met."""
        driver, experts = Bench().driver(), sizes.experts
        pool = SlotPool(driver, SLOTS, experts.chunk_bytes)
        layers = [
            pool.adopt(experts.layer(LAYERS * rank + layer, driver.device))
            for layer in range(LAYERS)
        ]
        chunks = layers[0].chunks.shape[0]
        programs = Programs(sizes.num_programs, sizes.num_programs)
        limits = Limits(WIDTH, chunks, sizes.patience_ns, programs)
        rendezvous = SocketRendezvous(run_path, rank, range(RANKS), sizes.seconds)
        location = Location.on_one_host(rank, RANKS)
        fabric = DeviceFabric(pool, rendezvous, location, limits)
        return cls(rank, experts, pool, layers, fabric, driver)

    def exchange(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (R, WIDTH) that came, and those that should have."""
        device = self.driver.device
        row = torch.arange(WIDTH, dtype=torch.int32, device=device) + epoch
        ranks = torch.arange(RANKS, dtype=torch.int32, device=device)
        return self.fabric.exchange(row + 1000 * self.rank), row + 1000 * ranks[:, None]

    def balance(self, epoch: int) -> int:
        """Slots that this rank had filled in one epoch. Raises AssertionError for a wrong one."""
        index, experts, device = epoch % LAYERS, self.experts, self.driver.device
        layer, chunks = self.layers[index], self.fabric.chunks(self.layers[index])
        rows, expected = self.exchange(epoch)
        slot_expert = _slots_of(experts.masters, epoch)
        on_device = slot_expert.to(device)
        mode = MODES[(epoch + epoch // LAYERS) % len(MODES)]  # each with either layer
        sends = self.fabric.sends(on_device, experts.masters, mode)
        stream = self.fabric.stream(on_device, experts.masters, sends)
        stream.send(chunks)
        stream.receive(chunks, self.fabric.patience_ns)
        self.fabric.require_peers()
        require_equal(rows, expected, "rows")
        masters = experts.layer(LAYERS * self.rank + index, device)
        for alias, master in zip(layer.tensors, masters, strict=True):
            assert torch.equal(alias[: experts.masters], master), f"masters changed in {epoch = }"
        held = slot_expert[self.rank].tolist()
        for slot, expert in enumerate(held):
            if expert >= 0:
                owner, local = divmod(expert, experts.masters)
                theirs = experts.layer(LAYERS * owner + index, device)
                for alias, master in zip(layer.tensors, theirs, strict=True):
                    arrived = alias[experts.masters + slot]
                    assert torch.equal(arrived, master[local]), f"{slot = } of {epoch = }"
        return len(held) - held.count(-1)


def _slots_of(masters: int, epoch: int) -> torch.Tensor:
    """(R, S): an expert of one rank on all others, so that relays have work, and a neighbour's."""
    ranks, hot = torch.arange(RANKS), epoch % RANKS
    first = torch.where(ranks == hot, -1, hot * masters)
    second = (ranks + 2) % RANKS * masters + masters - 1
    return torch.stack([first, second], dim=1).int()


def _require_same_slots(masters: int, one: torch.Tensor, other: torch.Tensor) -> None:
    """What is written through one layer's slots of a weight is read through the other's."""
    for slot in range(masters, masters + SLOTS):
        one[slot].fill_(slot)
        assert (other[slot] == slot).all(), "not the same memory"
        other[slot].fill_(-slot)
        assert (one[slot] == -slot).all(), "not the same memory"


def _require_equal_products(sizes: ExpertSizes, weight: torch.Tensor, one: int, other: int) -> None:
    """An unmodified grouped GEMM gives the same bits for equal experts at two places."""
    generator = torch.Generator(weight.device).manual_seed(1)
    shape = (sizes.tokens, weight.shape[2])
    x = torch.randn(shape, generator=generator, device=weight.device).bfloat16()
    ends = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
    products = []
    for expert in (one, other):
        ends[:expert], ends[expert:] = 0, sizes.tokens
        products.append(torch._grouped_mm(x, weight.transpose(1, 2), offs=ends))
    assert torch.equal(*products), "products differ"
    exact = x.double() @ weight[one].double().T
    error = (products[1].double() - exact).norm() / exact.norm()
    assert error < 1e-2, f"relative error {error:.1e}"


def _free_bytes(driver: Driver) -> int:
    """Memory that the device has left."""
    if driver.device.type != "cuda":
        return 0
    driver.reclaim()
    return torch.cuda.mem_get_info(driver.device)[0]
