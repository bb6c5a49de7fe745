"""The stages of a batch one by one on the device, for the self-check; the host waits for each.

They are the kernels that serve, compiled for what they are given here: loads that no exchange
brought, and plans that are followed whether they pay or not.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.device.checksum import checksums
from ultraep_kernels.device.count import Counted, count
from ultraep_kernels.device.plan import FollowUp, Sender, plan
from ultraep_kernels.device.relays import has_relays
from ultraep_kernels.device.reroute import new_physical
from ultraep_kernels.device.status import new_status

from ultraep_serve.balance.backend import GroupSetup, LayerSlots, Stages
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import IntArray, Plan

__all__ = ["device_stages", "gathered"]

Number = TypeVar("Number", np.int64, np.float64)


def device_stages(setup: GroupSetup, layers: Sequence[LayerSlots], fabric: DeviceFabric) -> Stages:
    """The stages of ranks that ``fabric`` has connected."""
    made = _DeviceStages(setup, layers, fabric)
    return Stages(
        rank=fabric.rank,
        gather=lambda values: gathered(fabric, values),
        count=made.count,
        route=made.route,
        replicate=made.replicate,
        checksums=made.checksums,
        layers=layers,
    )


def gathered(fabric: DeviceFabric, values: NDArray[Number]) -> NDArray[Number]:
    """All ranks' ``values`` (n,) of 8 bytes each, (R, n), in rows as the exchange takes them.

    Raises PeerTimeoutError.
    """
    words, width = values.view(np.int32), fabric.limits.row_width
    padded = np.zeros(-(-words.size // width) * width, np.int32)
    padded[: words.size] = words
    pieces = torch.from_numpy(padded).to(fabric.status.device).view(-1, width)
    rows = torch.cat([fabric.exchange(piece) for piece in pieces], dim=1).cpu()
    fabric.require_peers()
    return np.ascontiguousarray(rows.numpy()[:, : words.size]).view(values.dtype)


class _DeviceStages:
    """See ``Stages``, whose shape letters are used."""

    def __init__(
        self, setup: GroupSetup, layers: Sequence[LayerSlots], fabric: DeviceFabric
    ) -> None:
        self._shape, self._relay = setup.shape, setup.relay
        self._layers, self._fabric = layers, fabric
        self._device = fabric.status.device
        may_relay = has_relays(self._relay, setup.location.domain_size)
        self._by_relays = "always" if may_relay else "never"

    def count(self, ids: torch.Tensor) -> NDArray[np.int64]:
        counted = self._count(ids.to(self._device))
        return counted.load.cpu().numpy().astype(np.int64)

    def _count(self, ids: torch.Tensor) -> Counted:
        return count(ids, self._shape.num_logical_experts)

    def route(
        self, loads: NDArray[np.int64], context: PlanContext, source: int, ids: torch.Tensor
    ) -> tuple[Plan, torch.Tensor]:
        on_device = ids.to(self._device)
        physical = new_physical(on_device)
        found = plan(
            torch.from_numpy(loads).to(self._device, torch.int32),
            self._shape.num_replica_slots,
            source,
            new_status(self._device),
            domain_size=context.domain_size,
            speeds=torch.from_numpy(context.speeds).to(self._device, torch.int32),
            sender=Sender(self._fabric.rank, self._relay, self._fabric.epoch),
            follow_up=FollowUp(on_device, self._count(on_device), physical),
        )
        on_host = [part.cpu().numpy() for part in (found.slot_expert, found.quota, found.share)]
        return Plan(*on_host), physical.cpu()

    def replicate(self, layer: int, slot_expert: IntArray, by_relays: bool) -> None:
        fabric, masters = self._fabric, self._shape.num_masters
        slots = torch.from_numpy(slot_expert).to(self._device)
        nothing = torch.zeros(fabric.limits.row_width, dtype=torch.int32, device=self._device)
        fabric.exchange(nothing)  # nobody reads slots any more
        sends = fabric.sends(slots, masters, self._by_relays if by_relays else "never")
        sends.epoch.copy_(fabric.epoch[:1])
        sent = fabric.tables(self._layers[layer]), slots, masters, sends
        fabric.stream(*sent)
        fabric.receive(*sent)
        fabric.require_peers()

    def checksums(self, layer: int, wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
        on_device = torch.from_numpy(wanted.astype(np.int32)).to(self._device)
        return checksums(self._layers[layer].tensors, on_device).cpu().numpy()
