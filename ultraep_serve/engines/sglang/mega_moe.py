"""SGLang's megakernel over masters and slots: DeepGEMM's MegaMoE, one launch for a layer.

Models launch it past a layer's dispatcher (``run_mega_routed_experts``), with what the layer holds:
``num_experts``, of which its symmetric buffer is made at the first launch, and weights and scales
in the kernel's order, which share the memory of parameters. So slots are more rows of these and a
larger number, and all else comes in a hook around that function: ids are physical, and copies have
arrived. Read in SGLang 0.5.23, whose code ran here with a reference of DeepGEMM; the kernel itself
has not run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.moe import mega_moe
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from torch import nn

from ultraep_serve.engines.common.loaded import Execution
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.engines.sglang.checks import most_tokens
from ultraep_serve.engines.sglang.stage import SglangFlow, balance_launches
from ultraep_serve.types import ExpertShape

_TAKEN = ("mega_l1_weights", "mega_l2_weights")  # a layer's weights and scales, as it is launched


class MegaMoe(Execution[FusedMoE]):
    """``Execution`` by the megakernel."""

    def __init__(self, model: nn.Module, flow: SglangFlow) -> None:
        self._model, self._flow = model, flow

    def kernel(self, layer: FusedMoE) -> object:
        return layer.mega_l1_weights

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """See ``Execution.compute``; a shared expert that SGLang fuses is in it."""
        most = most_tokens()
        given = (torch.split(part, most) for part in (x, physical, topk_weights))
        sizes = {
            "hidden_size": layer.hidden_size,
            "intermediate_size": layer.intermediate_size_per_partition,
            "top_k": layer.top_k,
            "activation_clamp": layer.moe_runner_config.swiglu_limit,
            **self._shared_expert(layer),
        }
        with torch.inference_mode(), self._flow.unbalanced():
            outputs = [
                self._flow.launches[layer].launch(
                    mega_moe.run_mega_routed_experts, layer, *part, num_tokens=len(part[0]), **sizes
                )
                for part in zip(*given, strict=True)
            ]
        return torch.cat(outputs)

    def _shared_expert(self, layer: FusedMoE) -> dict[str, Any]:
        """What a launch of this layer has of it: with another number it has another buffer."""
        for block in self._model.modules():
            weights: Any = getattr(block, "mega_shared_l1_weights", None)
            if weights is not None and block.experts is layer:
                return {
                    "num_shared_experts": block.n_shared_experts,
                    "shared_l1_weights": weights,
                    "shared_l2_weights": block.mega_shared_l2_weights,
                }
        return {}

    def give_slots(self, layers: Sequence[ExpertWeights[FusedMoE]], shape: ExpertShape) -> None:
        for index, weights in enumerate(layers):
            layer = weights.layer
            layer.num_experts = shape.num_ranks * shape.num_local
            by_memory = {own.data_ptr(): own for own in weights.parameters}
            for name in _TAKEN:
                setattr(layer, name, tuple(by_memory[t.data_ptr()] for t in getattr(layer, name)))
            balance_launches(weights, index, self._flow)

    def take_slots(self, layers: Sequence[ExpertWeights[FusedMoE]], shape: ExpertShape) -> None:
        self._flow.launches.clear()
        for weights in layers:
            weights.layer.num_experts = shape.num_logical_experts
        mega_moe._MEGA_MOE_SYMM_BUFFER.clear()  # which were made for slots
