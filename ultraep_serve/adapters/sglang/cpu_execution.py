"""Experts on CPU as ``ExpertGroup`` asks for them; the arithmetic is in ``cpu_experts``."""

from collections.abc import Sequence

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from torch import nn

from ultraep_serve.adapters.execution import drop_slots
from ultraep_serve.adapters.sglang.checks import check_cpu_balancing
from ultraep_serve.adapters.sglang.cpu_experts import compute_and_reduce
from ultraep_serve.adapters.sglang.physical import tell_of_experts
from ultraep_serve.types import ExpertShape

__all__ = ["CpuExperts"]


class CpuExperts:
    """``Execution`` on CPU, where SGLang dispatches and the adapter computes."""

    def __init__(self) -> None:
        self._num_local = 0  # physical experts per rank

    def check(self, layer: FusedMoE) -> None:
        check_cpu_balancing(layer)

    def give_slots(self, layers: Sequence[FusedMoE], shape: ExpertShape) -> None:
        self._num_local = shape.num_local
        tell_of_experts(layers, shape.num_ranks * shape.num_local, shape.num_local)

    def take_slots_back(
        self,
        layers: Sequence[FusedMoE],
        parameters: Sequence[Sequence[nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        drop_slots(parameters, shape)
        tell_of_experts(layers, shape.num_logical_experts, shape.num_masters)

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        local = physical - layer.moe_ep_rank * self._num_local
        is_own = (local >= 0) & (local < self._num_local)
        own = torch.where(is_own, local, -1)
        return compute_and_reduce(x, topk_weights, own, layer.w13_weight, layer.w2_weight)
