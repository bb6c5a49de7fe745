"""Several processes on one device: they fill each other's slots, and one of them is killed.

They push experts into each other's memory, which they have imported, directly and through relays.
"""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import slots
import torch
from bench import Bench
from report import Report, require, require_equal

from tests.support.ranks import fresh_run_path, outcomes_of_ranks, run_ranks
from ultraep_serve.backend import LayerSlots
from ultraep_serve.cuda.driver import Driver
from ultraep_serve.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.cuda.rendezvous import SocketRendezvous
from ultraep_serve.cuda.slots import DeviceSlotPool
from ultraep_serve.errors import PeerTimeoutError

RANKS, WIDTH = 4, 64
MODES = ("always", "never")  # relays, by epoch
VICTIM = 1


@dataclass(frozen=True)
class Sizes:
    """What is checked with."""

    dry_run: bool
    experts: slots.Sizes
    epochs: int
    patience_ns: int  # while all live: processes share the GPU in turns
    patience_at_death_ns: int
    seconds: float  # for all processes to end


FULL = Sizes(False, slots.FULL, 10, 20_000_000_000, 500_000_000, 70.0)
TINY = Sizes(True, slots.TINY, 2, 2_000_000_000, 10_000_000, 240.0)


def run(bench: Bench, report: Report) -> None:
    """All live; then one is killed between two layers."""
    sizes = TINY if bench.dry_run else FULL
    report.run(f"{RANKS} processes, direct and relayed", check_processes, sizes)
    report.run("one of them is killed", check_death, sizes)


def check_processes(sizes: Sizes) -> dict[str, Any]:
    """Everybody's slots hold their masters' bytes in every epoch."""
    with fresh_run_path() as run_path:
        arguments = run_path, sizes
        filled = run_ranks(fill_each_other, RANKS, *arguments, timeout_seconds=sizes.seconds)
    require(min(filled) > 0, f"{filled = }")
    return {"checked": "the masters' bytes, the rows", "slots_filled_by_rank": filled}


def fill_each_other(rank: int, run_path: Path, sizes: Sizes) -> int:
    """Slots that were filled over all epochs, every one of them right; a process of its own."""
    member = Member.join(rank, run_path, sizes)
    filled = sum(member.balance(epoch) for epoch in range(sizes.epochs))
    member.exchange(sizes.epochs)  # nobody leaves before all have read their slots
    member.fabric.close()
    member.pool.close()
    return filled


def check_death(sizes: Sizes) -> dict[str, Any]:
    """The others' waits end in an error that says so."""
    with fresh_run_path() as run_path:
        arguments = run_path, sizes
        ended = outcomes_of_ranks(outlive, RANKS, *arguments, timeout_seconds=sizes.seconds)
    require(ended[VICTIM].signal == signal.SIGKILL, f"{ended[VICTIM] = }")
    told = [outcome.value for rank, outcome in enumerate(ended) if rank != VICTIM]
    require(all("gave up waiting" in str(text) for text in told), f"{ended = }")
    return {"checked": "PeerTimeoutError of all others", "told": told[0]}


def outlive(rank: int, run_path: Path, sizes: Sizes) -> str:
    """What a rank is told once VICTIM, which lived for an epoch, is gone."""
    member = Member.join(rank, run_path, sizes)
    member.balance(0)
    if rank == VICTIM:
        member.exchange(1)  # whatever it owed to the others is there
        member.driver.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    member.exchange(1)
    member.fabric.require_peers()
    patience = sizes.patience_at_death_ns
    member.fabric.limits = replace(member.fabric.limits, patience_ns=patience)
    member.exchange(2)
    try:
        member.fabric.require_peers()
    except PeerTimeoutError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Member:
    """One rank with a few layers."""

    rank: int
    sizes: Sizes
    pool: DeviceSlotPool
    layers: list[LayerSlots]
    fabric: DeviceFabric
    driver: Driver

    @classmethod
    def join(cls, rank: int, run_path: Path, sizes: Sizes) -> "Member":
        """Returns once all ranks have met."""
        driver, experts = Bench(sizes.dry_run).driver(), sizes.experts
        pool = DeviceSlotPool(driver, slots.SLOTS, experts.chunk_bytes)
        layers = [
            pool.adopt(slots.masters_of(experts, driver.device, slots.LAYERS * rank + layer))
            for layer in range(slots.LAYERS)
        ]
        programs = 2 if sizes.dry_run else 16
        limits = Limits(WIDTH, layers[0].chunks.shape[0], sizes.patience_ns, programs)
        rendezvous = SocketRendezvous(run_path, rank, RANKS, sizes.seconds)
        fabric = DeviceFabric(driver, pool, rendezvous, rank, RANKS, limits)
        return cls(rank, sizes, pool, layers, fabric, driver)

    def exchange(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (R, WIDTH) that came, and those that should have."""
        device = self.driver.device
        row = torch.arange(WIDTH, dtype=torch.int32, device=device) + epoch
        ranks = torch.arange(RANKS, dtype=torch.int32, device=device)
        return self.fabric.exchange(row + 1000 * self.rank), row + 1000 * ranks[:, None]

    def balance(self, epoch: int) -> int:
        """Slots that this rank had filled in one epoch. Raises AssertionError for a wrong one."""
        index, experts, device = epoch % slots.LAYERS, self.sizes.experts, self.driver.device
        layer, tables = self.layers[index], self.fabric.tables(self.layers[index])
        rows, expected = self.exchange(epoch)
        slot_expert = slots_of(experts.masters, epoch)
        on_device = slot_expert.to(device)
        mode = MODES[(epoch + epoch // slots.LAYERS) % len(MODES)]  # each with either layer
        self.fabric.stream(tables, on_device, experts.masters, mode)
        self.fabric.wait_slots(tables, on_device)
        self.fabric.require_peers()
        require_equal(rows, expected, "rows")
        for slot, expert in enumerate(slot_expert[self.rank].tolist()):
            owner, local = divmod(expert, experts.masters)
            theirs = slots.masters_of(experts, device, slots.LAYERS * owner + index)
            for alias, master in zip(layer.tensors, theirs, strict=True):
                here = alias[experts.masters + slot]
                require(torch.equal(here, master[local]), f"slot {slot} of epoch {epoch} is wrong")
        return slot_expert.shape[1]


def slots_of(masters: int, epoch: int) -> torch.Tensor:
    """(R, S): an expert of one rank on all others, so that relays have work, and a neighbour's."""
    ranks, hot = torch.arange(RANKS), epoch % RANKS
    first = torch.where(ranks == hot, (ranks + 1) % RANKS, hot) * masters
    second = (ranks + 2) % RANKS * masters + masters - 1
    return torch.stack([first, second], dim=1).int()
