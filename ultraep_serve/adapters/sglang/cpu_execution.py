"""Experts on CPU as ``ExpertGroup`` asks for them; the arithmetic is in ``cpu_experts``."""

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

from ultraep_serve.adapters.sglang.checks import check_cpu_balancing
from ultraep_serve.adapters.sglang.cpu_experts import compute_and_reduce
from ultraep_serve.adapters.sglang.physical import PhysicalExperts

__all__ = ["CpuExperts"]


class CpuExperts(PhysicalExperts):
    """``Execution`` on CPU, where SGLang dispatches and the adapter computes."""

    def check(self, layer: FusedMoE) -> None:
        check_cpu_balancing(layer)

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        local = physical - layer.moe_ep_rank * layer.num_local_experts
        is_own = (local >= 0) & (local < layer.num_local_experts)
        own = torch.where(is_own, local, -1)
        return compute_and_reduce(x, topk_weights, own, layer.w13_weight, layer.w2_weight)
