"""Balancing where experts live in host memory."""

from collections.abc import Callable

import numpy as np
import torch
from ultraep_kernels.count import count
from ultraep_kernels.reroute import reroute
from ultraep_kernels.stream import relay_parents

from ultraep_serve.adapters.measuring import agreed_costs, host_probes
from ultraep_serve.balancer import Balancer, PolicySource, TokenView, row_width
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.crossing import EngineGroup, HostCrossing
from ultraep_serve.domains import Location
from ultraep_serve.fabric import HostFabric
from ultraep_serve.observability.recorder import Recorder
from ultraep_serve.policies import identity_plan, warm_up
from ultraep_serve.slots import LayerSlots, SlotPool
from ultraep_serve.types import ExpertShape

__all__ = ["HostParts"]


class HostParts:
    """``Parts`` of ranks that meet in the run directory."""

    def __init__(
        self,
        config: BalanceConfig,
        shape: ExpertShape,
        view: TokenView,
        location: Location,
        group: EngineGroup | None = None,
    ) -> None:
        """``group`` is needed where there are several domains."""
        self._config, self._shape, self._view = config, shape, view
        self._location, self._group = location, group
        self._layers: list[LayerSlots] = []
        per_layer = config.slot_memory == "per_layer"
        self._pool = SlotPool(shape.num_replica_slots, config.chunk_bytes, per_layer)

    @property
    def slot_bytes(self) -> int:
        return self._pool.size

    def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
        self._layers.append(self._pool.adopt(masters))
        return self._layers[-1]

    def meet(self) -> None:
        location, seconds = self._location, self._config.timeout_seconds
        crossing = None
        if location.num_domains > 1:
            assert self._group is not None, "several domains are found through the group"
            crossing = HostCrossing(self._group.on_host, seconds)
        self._fabric = HostFabric(
            run_path=self._config.run_path,
            rank=location.rank,
            num_ranks=location.num_ranks,
            row_width=row_width(self._shape.num_logical_experts, self._view),
            pool=self._pool,
            max_chunks=max(layer.chunks.shape[0] for layer in self._layers),
            timeout_seconds=seconds,
            domain_size=location.domain_size,
            crossing=crossing,
        )

    def agree_on_costs(self, run_layer: Callable[[int], None]) -> CostModel:
        warm_up(self._shape)
        _warm_up_kernels(self._shape, self._layers[0], self._fabric)
        probes = host_probes(self._shape, self._layers[0], self._fabric)
        return agreed_costs(self._config, self._shape, self._layers[0], probes, run_layer)

    def make_balancer(
        self, policies: PolicySource | None, recorder: Recorder, costs: CostModel
    ) -> Balancer:
        return Balancer(
            self._config,
            self._shape,
            self._view,
            self._layers,
            self._fabric,
            policies,
            recorder,
            costs.integer_costs(),
        )


def _warm_up_kernels(shape: ExpertShape, layer: LayerSlots, fabric: HostFabric) -> None:
    """Compile what a planned batch calls, or load it from disk, by planning no tokens at all."""
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), np.int64)
    plan = identity_plan(loads, shape, source_rank=0)
    parents = relay_parents(plan.slot_expert, shape.num_masters, "never", shape.num_ranks)
    fabric.stream(layer, plan.slot_expert, parents, shape.num_masters)
    for dtype in (torch.int32, torch.int64):  # routers give either
        no_ids = torch.empty((0, 1), dtype=dtype)
        count(no_ids, shape.num_logical_experts)
        reroute(no_ids, plan.share, plan.slot_expert, shape.num_masters)
