"""A rank's layer of vLLM on CPU, as far as computing its experts looks at it."""

import warnings
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
        X86CPUUnquantizedExperts,
    )

__all__ = ["make_layer"]


class _Layer(SimpleNamespace):
    __hash__ = object.__hash__


def make_layer(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    activation: MoEActivation = MoEActivation.SILU,
    biased: bool = False,
    amx: bool = False,
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
    layer = _Layer(
        w13_weight=cpu_prepack_moe_weight(w13, kind.isa),
        w2_weight=cpu_prepack_moe_weight(w2, kind.isa),
        top_k=top_k,
        hidden_size=hidden,
        moe_config=SimpleNamespace(num_experts=2 * num_local, ep_size=2, dp_size=1, in_dtype=dtype),
        quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel)),
        activation=activation,
        apply_router_weight_on_input=False,
    )
    return layer, [w13, w2]
