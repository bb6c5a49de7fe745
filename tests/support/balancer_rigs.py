"""Ranks with a device's balancer, for its checks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import ultraep_kernels.device.plan
import ultraep_kernels.host.plan
from ultraep_kernels.contract import Search
from ultraep_kernels.device.stream import Programs

from tests.support.costs import FREE
from tests.support.host_driver import HostDriver
from tests.support.mirror import FakeRecorder, mirrored_balancer
from ultraep_serve.balance.backend import GroupSetup, row_width
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.balance.memory import Driver
from ultraep_serve.balance.rendezvous import SocketRendezvous
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.device import DeviceSamples
from ultraep_serve.proof.samples import Sampled
from ultraep_serve.system.topology import Location
from ultraep_serve.types import ExpertShape, TokenView

LAYERS, SMALL, CHUNK_BYTES = 2, 8, 4096
PATIENCE_NS = 3_000_000_000
CONFIG = BalanceConfig(min_batch_tokens=SMALL, timeout_seconds=60.0, allow_ideal=True)
SHAPES = ((200, 25), (3,))  # mapped behind masters, packed


def search_briefly() -> None:
    """Both planners make a few attempts only: the interpreter is slow. For a process of its own."""
    for module in (ultraep_kernels.device.plan, ultraep_kernels.host.plan):
        module.search_of = lambda *_: Search(512, first=2, limit=4, sweeps=8, thrifty=2)


def masters_of(
    rank: int, layer: int, num_masters: int, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + layer)
    return [torch.randn(num_masters, *shape, generator=generator) for shape in shapes]


def skewed(rank: int) -> torch.Tensor:
    """Everybody wants the first experts, rank by rank a little less; every ninth is padding."""
    rng = np.random.default_rng(rank)
    ids = np.minimum(rng.geometric(0.5, size=(150 + 30 * rank, 2)) - 1, 7)
    ids[::9] = -1
    return torch.from_numpy(ids).int()


def even(_rank: int) -> torch.Tensor:
    return (torch.arange(64) % 8).view(-1, 2)


@dataclass(frozen=True)
class Setup:
    """Of a group."""

    shape: ExpertShape
    view: TokenView
    config: BalanceConfig = CONFIG
    costs: IntegerCosts = FREE
    is_sampled: bool = False  # on the device
    answers: Answers | None = None  # of samples


@dataclass
class Rig:
    """One rank with a balancer, and what that records."""

    balancer: Any
    layers: list[LayerSlots]
    recorder: FakeRecorder
    fabric: Any


def device_rig(
    rank: int,
    run_path: Path,
    setup: Setup,
    patience_ns: int = PATIENCE_NS,
    driver: Driver | None = None,
) -> Rig:
    """``driver`` of a GPU where it is not the host."""
    shape, view, config = setup.shape, setup.view, setup.config
    driver = driver or HostDriver()
    pool = SlotPool(driver, shape.num_slots, CHUNK_BYTES, config.slot_memory == "per_layer")
    masters = [masters_of(rank, i, shape.num_masters) for i in range(LAYERS)]
    layers = [pool.adopt([each.to(driver.device) for each in layer]) for layer in masters]
    width, chunks = row_width(shape.num_logical_experts, view), layers[0].chunks.shape[0]
    limits = Limits(width, chunks, patience_ns, Programs(2, 2))
    location, recorder = Location.on_one_host(rank, shape.num_ranks), FakeRecorder()
    group_setup = GroupSetup(config, shape, view, location, relay="auto", chunk_bytes=CHUNK_BYTES)
    rendezvous = SocketRendezvous(run_path, rank, location.domain, 60.0)
    fabric = DeviceFabric(pool, rendezvous, location, limits)
    policies = recorder if rank == 0 else None
    samples = None
    if config.verify_every and setup.is_sampled:
        parameters = [layer.tensors for layer in layers]
        sampled = Sampled(parameters, setup.answers, run_path / f"verification-{rank}", dict)
        samples = DeviceSamples(group_setup, fabric, sampled, recorder, policies)
    balancer = DeviceBalancer(group_setup, layers, fabric, policies, recorder, setup.costs, samples)
    return Rig(balancer, layers, recorder, fabric)


def alone(
    config: BalanceConfig, recorder: FakeRecorder, costs: IntegerCosts = FREE
) -> DeviceBalancer:
    """A group of one rank."""
    setup = GroupSetup(config, ExpertShape(1, 8, 1), TokenView.OWN, Location.on_one_host(0, 1))
    rows = torch.zeros((1, row_width(8, TokenView.OWN)), dtype=torch.int32)
    layers = [masters_of(0, i, 8) for i in range(LAYERS)]
    return mirrored_balancer(
        HostDriver(), setup, layers, rows, recorder, 100, Programs(1, 0), costs
    )[0]
