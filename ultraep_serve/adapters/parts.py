"""What balancing is made of that differs between hosts and GPUs."""

from collections.abc import Callable
from typing import Protocol

import torch

from ultraep_serve.adapters.host_parts import HostParts
from ultraep_serve.balancer import PolicySource, TokenView
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.crossing import EngineGroup
from ultraep_serve.domains import Location
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.observability.recorder import Recorder
from ultraep_serve.slots import LayerSlots
from ultraep_serve.types import ExpertShape

__all__ = ["Parts", "Routing", "parts_for"]


class Routing(Protocol):
    """A balancer, as layers use it; see ``Balancer`` for what the methods do."""

    config: BalanceConfig

    def route(
        self, layer: int, topk_ids: torch.Tensor, batch_tokens: int, micro_batch: int = 0
    ) -> torch.Tensor: ...

    def computed(self, micro_batch: int = 0) -> None: ...


class Parts(Protocol):
    """Used in this order: all layers are adopted, ranks meet, costs, the balancer."""

    @property
    def slot_bytes(self) -> int:
        """What this rank's replica slots cost, once all layers are adopted."""

    def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
        """Move one layer's expert tensors (L, ...) in front of the slots; returns the aliases.

        The old tensors may be empty afterwards. Raises UnsupportedError, ConfigError, DeviceError.
        """

    def meet(self) -> None:
        """Return when all ranks of the domain reach each other's slots. Raises FabricError."""

    def agree_on_costs(self, run_layer: Callable[[int], None]) -> CostModel:
        """Measured by all ranks together, see ``measuring.agreed_costs``."""

    def make_balancer(
        self, policies: PolicySource | None, recorder: Recorder, costs: CostModel
    ) -> Routing:
        """The balancer, warm; all ranks together. ``policies`` is rank 0's."""


def parts_for(
    device: torch.device,
    config: BalanceConfig,
    shape: ExpertShape,
    view: TokenView,
    location: Location,
    group: EngineGroup | None,
) -> Parts:
    """The parts for experts on ``device``; ``group`` is needed where there are several domains.

    Raises UnsupportedError, ConfigError.
    """
    if device.type == "cpu":
        return HostParts(config, shape, view, location, group)
    if device.type != "cuda":
        raise UnsupportedError(f"experts on {device} cannot be balanced; serve with --policy off")
    # Only here: needs Triton, which a host without a GPU may do without.
    from ultraep_serve.adapters.device_parts import DeviceParts
    from ultraep_serve.cuda.driver import open_driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceParts(open_driver(index), config, shape, view, location, group)
