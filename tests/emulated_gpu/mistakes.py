"""Mistakes that samples must find, made on purpose in the second MoE layer of prefill batches.

The file that ``EMULATED_GPU_MISTAKE`` names says which one is made as long as it exists:

slot   one bit is flipped in the first weight of every slot, behind the copies' arrival
lost   copies are lost: slots keep what they held
id     the last token's first assignment goes to the physical expert beside the planned one
"""

import os
from functools import wraps
from pathlib import Path
from typing import Any

__all__ = ["FOUND_BY", "PLACE", "make_mistakes"]

PLACE = "EMULATED_GPU_MISTAKE"
FOUND_BY = {"slot": "slots", "lost": "slots", "id": "assignments"}  # the sample that must fail
LAYER, FEWEST_TOKENS = 1, 64


def make_mistakes() -> None:
    """Make them in this process, whenever the file says so."""
    place = os.environ.get(PLACE)
    if not place:
        return
    import torch

    from ultraep_serve.balance.cuda.balancer import DeviceBalancer

    start, route = DeviceBalancer.__init__, DeviceBalancer.route
    plan, receive = DeviceBalancer._plan, DeviceBalancer.receive
    if hasattr(start, "__wrapped__"):
        return  # plug-ins may be called again

    @wraps(start)
    def started(self: Any, setup: Any, layers: Any, *others: Any, **named: Any) -> None:
        start(self, setup, layers, *others, **named)
        masters = setup.shape.num_masters
        self.first_weights = layers[LAYER].tensors[0][masters:].flatten(1).view(torch.uint8)
        self.all_slots = [tensor[masters:] for tensor in layers[LAYER].tensors]
        self.mistake, self.held = "", []

    @wraps(route)
    def routed(self: Any, layer: int, topk_ids: Any, *others: Any, **named: Any) -> Any:
        is_meant = layer == LAYER and len(topk_ids) >= FEWEST_TOKENS and os.path.exists(place)
        self.mistake = Path(place).read_text() if is_meant else ""
        if self.mistake == "lost":
            self.held = [tensor.clone() for tensor in self.all_slots]
        return route(self, layer, topk_ids, *others, **named)

    @wraps(plan)
    def planned(self: Any, part: Any, layer: int, ids: Any, physical: Any) -> None:
        plan(self, part, layer, ids, physical)
        if self.mistake == "id":
            physical[-1, 0] = physical[-1, 0] ^ 1

    @wraps(receive)
    def received(self: Any, *others: Any, **named: Any) -> None:
        receive(self, *others, **named)
        if self.mistake == "slot":
            self.first_weights[:, 3] ^= 0x40  # of a float32 or, in two bytes, of the second one
        if self.mistake == "lost":
            for tensor, held in zip(self.all_slots, self.held, strict=True):
                tensor.copy_(held)

    DeviceBalancer.__init__, DeviceBalancer.route = started, routed
    DeviceBalancer._plan, DeviceBalancer.receive = planned, received
