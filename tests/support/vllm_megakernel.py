"""Layers whose experts FlashInfer's megakernels compute, as vLLM makes them after loading."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import nvfp4_moe_quant_config
from vllm.model_executor.layers.fused_moe.experts.flashinfer_moe_ep import FlashInferMoeEpExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)


def give_megakernel(layer: Any, config: VllmConfig) -> None:
    """Give a loaded ``layer`` the kernel, and scales of NVFP4: some it reads, some it does not."""
    number = layer.local_num_experts
    alphas = 2.0 ** (torch.arange(number) % 4 - 1)
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        weight.data /= alphas[:, None, None].to(weight.dtype)
        setattr(layer, f"{name}_scale_2", _parameter(alphas.clone()))
    for name in ("w13_input_scale", "w2_input_scale"):  # differ by expert, and are not read
        setattr(layer, name, _parameter(torch.arange(1.0, number + 1)))
    method = layer.quant_method
    method.moe_quant_config = nvfp4_moe_quant_config(
        g1_alphas=layer.w13_weight_scale_2,
        g2_alphas=layer.w2_weight_scale_2,
        a1_gscale=1 / layer.w13_input_scale,
        a2_gscale=1 / layer.w2_input_scale,
        w1_scale=torch.rand(number, 2),  # as in the checkpoint: the kernel has its own by now
        w2_scale=torch.rand(number, 2),
    )
    experts = FlashInferMoeEpExperts(layer.moe_config, method.moe_quant_config)
    method.moe_kernel = mk.FusedMoEKernel(PassThroughPrepareAndFinalize(), experts)
    with set_current_vllm_config(config):
        experts.process_weights_after_loading(layer)


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
