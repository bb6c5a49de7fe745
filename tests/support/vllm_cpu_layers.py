"""A rank's layer of vLLM on CPU, as far as its kernel looks at it."""

import warnings
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
        X86CPUUnquantizedExperts,
    )

    from ultraep_serve.engines.vllm.host import HostExperts, HostStage

__all__ = ["compute", "make_layer", "put_in_kernel"]


class _Layer(SimpleNamespace):
    __hash__ = object.__hash__


def make_layer(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    activation: MoEActivation = MoEActivation.SILU,
    biased: bool = False,
    amx: bool = False,
    dp_size: int = 1,
) -> tuple[Any, list[torch.Tensor]]:
    """A layer with half of its experts here, and w13 (L, 2I, H) and w2 (L, H, I) before packing.

    ``sizes`` L, H, I and K. With ``amx`` for vLLM's kernel that needs it.
    """
    num_local, hidden, inner, top_k = sizes
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    w13 = random(num_local, 2 * inner, hidden) / hidden**0.5
    w2 = random(num_local, hidden, inner) / inner**0.5
    biases = (random(num_local, 2 * inner), random(num_local, hidden)) if biased else (None,) * 2
    kind = X86CPUUnquantizedExperts if amx else CPUUnquantizedExperts
    kernel = kind.__new__(kind)
    kernel._use_zentorch = False
    kernel.quant_config = biased_moe_quant_config(*biases)
    kernel.moe_config = moe = SimpleNamespace(
        num_experts=2 * num_local,
        ep_size=2,
        dp_size=dp_size,
        in_dtype=dtype,
        experts_per_token=top_k,
        moe_parallel_config=SimpleNamespace(dp_size=dp_size, use_ep=True),
    )
    layer = _Layer(
        w13_weight=cpu_prepack_moe_weight(w13, kind.isa),
        w2_weight=cpu_prepack_moe_weight(w2, kind.isa),
        top_k=top_k,
        moe_config=moe,
        quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel)),
        activation=activation,
        apply_router_weight_on_input=False,
    )
    return layer, [w13, w2]


def put_in_kernel(layer: Any, *, with_products: bool = False) -> HostStage:
    """Give ``layer`` the kernel that is ours, as ``put_in_kernels`` does; returns its stage."""
    stage = HostStage(layer.moe_config)
    kernel = layer.quant_method.moe_kernel.fused_experts
    experts = HostExperts.__new__(HostExperts)  # whose base looks at more of a configuration
    experts.kernel, experts._stage, experts._with_products = kernel, stage, with_products
    experts.moe_config, experts.quant_config = kernel.moe_config, kernel.quant_config
    layer.quant_method.moe_kernel = mk.FusedMoEKernel(stage, experts)
    return stage


def compute(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The output (T, H) of ``layer``'s kernel for ``x`` (T, H)."""
    output: torch.Tensor = layer.quant_method.moe_kernel.apply(
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=ids,
        activation=layer.activation,
        global_num_experts=layer.moe_config.num_experts,
        expert_map=None,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
    )
    return output
