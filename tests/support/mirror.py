"""One rank of many whose peers are itself, and have all posted what it will ever wait for.

For checking and measuring one rank's device balancer in one process; needs Triton. What this rank
sends lands in its own slots, so their bytes mean nothing.
"""

import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ultraep_kernels.contract import FLAG_BYTES
from ultraep_kernels.device.exchange import inbox_bytes
from ultraep_kernels.device.stream import Programs

from tests.support.costs import FREE
from tests.support.ring_files import KeepsNothing
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.balance.memory import Driver, HandleKind, Shareable
from ultraep_serve.balance.rendezvous import Handshake
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.record import LayerRecord
from ultraep_serve.types import Decision, Policy, Stage, VerificationCheck

POSTED = 1 << 40  # an epoch that nobody reaches


@dataclass
class FakeRecorder(KeepsNothing):
    """Recorder and policy source in one; what came is kept as plain values."""

    policy: Policy = Policy.QUOTA
    events: list[Any] = field(default_factory=list)  # records, and decisions on whole batches
    stage_ns: list[int] = field(default_factory=list)  # of the last record
    verified: list[VerificationCheck] = field(default_factory=list)
    failures: list[VerificationCheck] = field(default_factory=list)

    def record(self, record: LayerRecord) -> None:
        self.stage_ns = list(record.stage_ns)
        assert len(self.stage_ns) == len(Stage)
        assert min(self.stage_ns) >= 0
        values = {name: np.asarray(value).tolist() for name, value in record._asdict().items()}
        del values["stage_ns"]
        self.events.append(values)

    def count_batch(self, decision: Decision) -> None:
        self.events.append(decision)

    def count_verified(self, check: VerificationCheck, _nanoseconds: int) -> None:
        self.verified.append(check)

    def count_verification_failure(self, check: VerificationCheck) -> None:
        self.failures.append(check)

    def switch_off_in_doubt(self) -> None:
        self.policy = Policy.OFF


class Mirror:
    """A rendezvous whose other ranks are this one, through descriptors of its own memory."""

    kind = HandleKind.FILE_DESCRIPTOR

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def swap(
        self, layout: bytes, shareables: Sequence[Shareable]
    ) -> Generator[tuple[int, Handshake]]:
        """As ``SocketRendezvous.swap``."""
        for rank in range(self._num_ranks):
            if rank != self._rank:
                yield rank, Handshake(layout, [os.dup(int(item)) for item in shareables])


def bare_config(min_batch_tokens: int, max_imbalance: float, slot_memory: str = "shared") -> Any:
    """What DeviceBalancer reads of BalanceConfig, which needs pydantic."""
    return SimpleNamespace(
        policy=Policy.QUOTA,
        min_batch_tokens=min_batch_tokens,
        max_imbalance=max_imbalance,
        allow_ideal=False,
        speeds="equal",
        slot_memory=slot_memory,
    )


def mirrored_balancer(
    driver: Driver,
    setup: GroupSetup,
    layers: list[list[torch.Tensor]],
    rows: torch.Tensor,
    recorder: FakeRecorder,
    patience_ns: int,
    programs: Programs,
    costs: IntegerCosts = FREE,
) -> tuple[DeviceBalancer, DeviceFabric]:
    """Rank 0's, which finds ``rows`` (R, W) int32 of its peers in every exchange.

    Row 0 does not count: rank 0 posts its own. ``layers`` are masters (L, ...).
    """
    pool = SlotPool(driver, setup.shape.num_slots, setup.chunk_bytes)
    adopted = [pool.adopt(masters) for masters in layers]
    limits = Limits(rows.shape[1], adopted[0].chunks.shape[0], patience_ns, programs)
    num_ranks = rows.shape[0]
    location = Location.on_one_host(0, num_ranks)
    fabric = DeviceFabric(pool, Mirror(0, num_ranks), location, limits)
    inbox = inbox_bytes(num_ranks, limits.row_width)
    signals = driver.tensor(
        int(fabric.inboxes.addresses[0]), inbox + pool.num_slots * limits.max_chunks * 8
    )
    ends = num_ranks * FLAG_BYTES
    signals[:ends].view(torch.int64).view(num_ranks, -1)[1:, 0] = POSTED
    signals[ends:inbox].view(torch.int32).view(2, num_ranks, -1)[:] = rows
    signals[inbox:].view(torch.int64)[:] = POSTED
    policies: Any = recorder
    return DeviceBalancer(setup, adopted, fabric, policies, policies, costs), fabric
