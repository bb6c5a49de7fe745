"""Ranks of one process: each with memory that the others have mapped at addresses of their own."""

import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from ultraep_kernels.device.stream import Programs

from tests.support.balancer_rigs import SHAPES, masters_of
from tests.support.host_driver import HostDriver
from tests.support.mirror import FakeRecorder
from ultraep_serve.balance.backend import GroupSetup, row_width
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.balance.memory import HandleKind, Shareable
from ultraep_serve.balance.rendezvous import Handshake
from ultraep_serve.balance.slots import LayerSlots, SlotPool

__all__ = [
    "PATIENCE_NS",
    "WEIGHTS",
    "Rank",
    "Stream",
    "Weights",
    "connect_all",
    "measured_picoseconds",
    "new_rank",
]

PATIENCE_NS = 1 << 50  # nobody gives up
_GRANULARITY = 1 << 12  # of mapped memory, bytes
_NUM_PROGRAMS = 2  # that send, and that forward


@dataclass(frozen=True)
class Weights:
    """Tensors of every expert, and how they are cut."""

    shapes: tuple[tuple[int, ...], ...] = SHAPES
    chunk_bytes: int = 4096

    def of(self, rank: int, layer: int, num_masters: int) -> list[torch.Tensor]:
        """Those of one rank's masters."""
        return masters_of(rank, layer, num_masters, self.shapes)


WEIGHTS = Weights()


@dataclass
class Stream:
    """One in which a rank's work is done."""

    last: set[int] = field(default_factory=set)  # the next work comes behind these


@dataclass
class Rank:
    """One rank: its balancer, memory and streams."""

    number: int
    setup: GroupSetup
    driver: HostDriver
    layers: list[LayerSlots]
    recorder: FakeRecorder
    pool: SlotPool
    fabric: DeviceFabric = field(init=False)
    balancer: DeviceBalancer = field(init=False)
    stream: Stream = field(default_factory=Stream)  # that is current


def measured_picoseconds(rank: int) -> int:
    """What an assignment takes on a rank, by its own clock."""
    return 1000 + 300 * rank


def new_rank(number: int, setup: GroupSetup, num_layers: int, weights: Weights) -> Rank:
    """One whose layers are in place; it knows no other yet."""
    driver = HostDriver(granularity=_GRANULARITY)
    per_layer = setup.config.slot_memory == "per_layer"
    pool = SlotPool(driver, setup.shape.num_slots, setup.chunk_bytes, per_layer)
    masters = setup.shape.num_masters
    layers = [pool.adopt(weights.of(number, layer, masters)) for layer in range(num_layers)]
    return Rank(number, setup, driver, layers, FakeRecorder(), pool)


def connect_all(ranks: list[Rank], gather_of: Any, patience_ns: int) -> None:
    """Ranks of a domain map each other; ``gather_of`` a rank: its all-gather over domains."""
    size = ranks[0].setup.location.domain_size
    meetings = [_Meeting(size) for _ in range(0, len(ranks), size)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        made = []
        for rank in ranks:
            meeting = meetings[rank.number // size]
            made.append(pool.submit(_connect, rank, meeting, gather_of, patience_ns))
    for each in made:
        each.result()


def _connect(rank: Rank, meeting: "_Meeting", gather_of: Any, patience_ns: int) -> None:
    shape, size = rank.setup.shape, rank.setup.location.domain_size
    width = row_width(shape.num_logical_experts, rank.setup.view)
    chunks = rank.layers[0].chunks.shape[0]
    limits = Limits(width, chunks, patience_ns, Programs(_NUM_PROGRAMS, _NUM_PROGRAMS))
    rendezvous = meeting.of(rank.number)
    gather = gather_of(rank.number) if size < shape.num_ranks else None
    place = rank.setup.location
    rank.fabric = DeviceFabric(rank.pool, rendezvous, place, limits, gather)


class _Meeting:
    """A rendezvous of ranks that are threads of this process."""

    kind = HandleKind.FILE_DESCRIPTOR

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._said: dict[int, tuple[bytes, list[int]]] = {}

    def of(self, rank: int) -> Any:
        """For a rank of the domain."""
        meeting = self

        class _Rendezvous:
            kind = meeting.kind

            def swap(
                self, layout: bytes, shareables: Sequence[Shareable]
            ) -> Generator[tuple[int, Handshake]]:
                return meeting.swap(rank, layout, shareables)

        return _Rendezvous()

    def swap(
        self, rank: int, layout: bytes, shareables: Sequence[Shareable]
    ) -> Generator[tuple[int, Handshake]]:
        """As ``Rendezvous.swap``."""
        self._said[rank] = layout, [int(item) for item in shareables]
        self._barrier.wait(60)
        for other, (said, items) in sorted(self._said.items()):
            if other != rank:
                yield other, Handshake(said, [os.dup(item) for item in items])
        self._barrier.wait(60)
