"""What must come of a batch: the CPU balancers' answers for the same ids."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.emulated_gpu.kernels.ranks import Weights, measured_picoseconds
from tests.support.costs import FREE
from tests.support.mirror import FakeRecorder
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.host.balancer import HostBalancer
from ultraep_serve.types import ExpertShape, Plan

__all__ = ["Routed", "Twins", "moved"]


@dataclass
class Routed:
    """What the twin of one rank answered."""

    physical: torch.Tensor
    plan: Plan | None


class Twins:
    """``HostBalancer`` of every rank, each in a thread; nothing is copied."""

    def __init__(
        self,
        shape: ExpertShape,
        setup_of: Callable[[int], GroupSetup],
        num_layers: int,
        weights: Weights,
    ) -> None:
        self._num_layers, self._weights = num_layers, weights
        sizes = shape.num_ranks, shape.num_logical_experts, shape.num_replica_slots
        self._shape, self._setup_of = ExpertShape(*sizes), setup_of
        self._pool = ThreadPoolExecutor(shape.num_ranks)
        self._barrier = threading.Barrier(shape.num_ranks)
        self._rows: list[Any] = [None] * shape.num_ranks
        self._recorders = [FakeRecorder() for _ in range(shape.num_ranks)]
        self._balancers = [self._new_balancer(n) for n in range(shape.num_ranks)]

    def route(self, layer: int, ids: list[torch.Tensor], tokens: int) -> list[Routed]:
        """By rank."""

        def one(rank: int) -> Routed:
            balancer = self._balancers[rank]
            balancer._routed = None
            physical = balancer.route(layer, ids[rank], tokens)
            routed: Any = balancer._routed
            plan = None if routed is None else routed.plan
            balancer.computed()
            return Routed(physical, plan)

        return list(self._pool.map(one, range(self._shape.num_ranks)))

    def identity(self, ids: list[torch.Tensor]) -> list[Routed]:
        """By rank, where no layer is routed."""
        pairs = zip(self._balancers, ids, strict=True)
        return [Routed(balancer.identity(own), None) for balancer, own in pairs]

    def forget(self, rank: int) -> None:
        """Of one rank: experts may have changed."""
        self._balancers[rank].forget()

    @property
    def asked(self) -> FakeRecorder:
        """Where rank 0 reads the policy."""
        return self._recorders[0]

    def events(self, rank: int) -> list[Any]:
        """What was recorded."""
        return self._recorders[rank].events

    def _new_balancer(self, rank: int) -> HostBalancer:
        setup = self._setup_of(rank)
        setup = replace(setup, shape=self._shape)
        masters = self._weights.of(rank, 0, self._shape.num_masters)
        sizes = [tensor.element_size() * tensor[0].numel() for tensor in masters]
        layers: list[Any] = [SimpleNamespace(bytes_per_expert=sum(sizes))] * self._num_layers
        fabric: Any = SimpleNamespace(
            rank=rank,
            exchange=lambda row: self._exchange(rank, row),
            stream=lambda *_: None,
            wait_slots=lambda *_: None,
        )
        recorder: Any = self._recorders[rank]
        balancer = HostBalancer(setup, layers, fabric, None if rank else recorder, recorder, FREE)
        balancer._own_time.picoseconds = measured_picoseconds(rank)
        return balancer

    def _exchange(self, rank: int, row: Any) -> Any:
        self._rows[rank] = row
        self._barrier.wait(60)
        rows = np.stack(self._rows)
        self._barrier.wait(60)
        return rows


def moved(physical: torch.Tensor, shape: ExpertShape, micro_batch: int) -> torch.Tensor:
    """Ids of a group whose ranks have slots of one micro-batch, where there are more."""
    local = shape.num_masters + shape.num_replica_slots
    rank, own = physical // local, physical % local
    own = torch.where(own < shape.num_masters, own, own + micro_batch * shape.num_replica_slots)
    return torch.where(physical < 0, physical, rank * shape.num_local + own)
