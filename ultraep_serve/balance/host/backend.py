"""Balancing where experts live in host memory."""

import time
from collections.abc import Callable

import numpy as np
import torch
from ultraep_kernels.host.count import count
from ultraep_kernels.host.exchange import contradictions
from ultraep_kernels.host.relays import relay_parents
from ultraep_kernels.host.reroute import reroute

from ultraep_serve.balance.backend import Backend, GroupSetup, row_width
from ultraep_serve.balance.host.balancer import HostBalancer
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.costs.calibration import Probes, probe_loads
from ultraep_serve.plan.quota import plan_quota, warm_up

_REPEATS = 3
_EXCHANGES = 20


class HostBackend(Backend):
    """Of ranks that find each other in the run directory."""

    balancer_class = HostBalancer
    fabric: HostFabric

    def __init__(self, setup: GroupSetup) -> None:
        per_layer = setup.config.slot_memory == "per_layer"
        slots = setup.shape.num_replica_slots
        super().__init__(setup, SlotPool(HostMemory(), slots, setup.chunk_bytes, per_layer))

    def connect(self) -> None:
        setup, location, group = self.setup, self.setup.location, None
        if location.num_domains > 1:
            assert setup.engine_group is not None, "several domains are found through the group"
            group = setup.engine_group.on_host
        self.fabric = HostFabric(
            run_path=setup.run_path,
            location=location,
            row_width=row_width(setup.shape.num_logical_experts, setup.view),
            pool=self._pool,
            max_chunks=max(layer.chunks.shape[0] for layer in self.layers),
            timeout_seconds=setup.config.timeout_seconds,
            group=group,
        )
        self._undo.callback(self.fabric.close)
        self.fabric.wait_at_least(setup.connect_seconds)

    def _warm_up_kernels(self, layer: LayerSlots) -> None:
        """Compile what a planned batch calls, or load it from disk, by planning no tokens."""
        shape = self.setup.shape
        warm_up(shape)
        loads = np.zeros((shape.num_ranks, shape.num_logical_experts), np.int64)
        plan = plan_quota(loads, self.setup.context, source_rank=0)
        parents = relay_parents(plan.slot_expert, shape.num_masters, "always")  # compiled then
        self.fabric.stream(layer, plan.slot_expert, parents, shape.num_masters)
        for dtype in (torch.int32, torch.int64):  # routers give either
            no_ids = torch.empty((0, 1), dtype=dtype)
            count(no_ids, shape.num_logical_experts)
            reroute(no_ids, plan.share, plan.slot_expert, shape.num_masters)
        rows = np.zeros((1, 1 + self.fabric.row_width), np.int64)
        for some in (rows, rows[:, :-1]):  # side by side, and apart
            contradictions(some)

    def _probes(self, layer: LayerSlots) -> Probes:
        self._warm_up_kernels(layer)
        shape, fabric = self.setup.shape, self.fabric
        loads, context = probe_loads(shape), self.setup.context

        def exchange() -> float:
            row = np.zeros(1, np.int64)
            return _best(lambda: [fabric.exchange(row) for _ in range(_EXCHANGES)]) / _EXCHANGES

        def copy_one_expert() -> None:
            """Copy master 0 into slot 0, or onto itself where there are no slots."""
            target = shape.num_masters if shape.num_replica_slots else 0
            for tensor in layer.tensors:
                tensor[target].copy_(tensor[0].clone())

        return Probes(
            seconds=_best,
            exchange=exchange,
            send_expert=lambda: _best(copy_one_expert),
            plan=lambda: _best(lambda: plan_quota(loads, context, 0)),
            gather=lambda values: fabric.exchange(values.view(np.int64)).view(np.float64),
            bytes_before_relay=int(layer.chunks[:, 3].max()),
        )


def _best(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: what the machine can do, not what disturbed it."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
