"""Expert parallelism on CPU, which SGLang's own torch path does not survive.

SGLang marks assignments of other ranks with -1 and its plain torch experts then index with that.

Where experts may be computed by another rank than usual, sums of 16-bit models are taken in float32
until they are complete, across ranks too: weighted outputs in bfloat16 have 8 significant bits, so
that is exact unless they differ in size by more than 2**13. So no token's result depends on which
rank computed which expert. Elsewhere, as in decode, SGLang adds ranks up by itself.

Experts are products of matrices, in the model's type as SGLang has them, or in float32 where this
CPU emulates that type.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul, SituAndMul
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import swiglu_gpt_oss_sigmoid_alpha
from sglang.srt.runtime_context import get_parallel

from ultraep_serve.balance.speeds import expert_clock
from ultraep_serve.engines.common.cpu_experts import (
    Expert,
    added_up,
    by_expert,
    float32_product,
    own_type,
)

__all__ = ["ACTIVATIONS", "complete_device_module", "compute_and_reduce", "compute_own"]

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # of gate and up (N, 2I) to (N, I)
ACTIVATIONS = ("silu", "gelu", "situ")  # that SGLang's torch path has, all gated


def compute_and_reduce(
    layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, local_ids: torch.Tensor
) -> torch.Tensor:
    """Do as ``compute_own``, with a sum that is the same wherever experts are computed.

    In 16-bit models the first rank's part is all of it and the others' are zero, so that the
    engine's sum does not round it again. All ranks call it together.
    """
    own = compute_own(layer, x, topk_weights, local_ids)
    if x.dtype is torch.float32:
        return own
    group = get_parallel().moe_ep_group
    everything: torch.Tensor = group.all_reduce(own)
    return (everything if group.rank_in_group == 0 else everything.zero_()).to(x.dtype)


def compute_own(
    layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, local_ids: torch.Tensor
) -> torch.Tensor:
    """This rank's part of the output, (T, H) float32, to be summed over ranks by the engine.

    ``layer`` is SGLang's, with ``w13_weight`` (L + S, 2I, H), ``w2_weight`` (L + S, H, I) and
    perhaps ``w13_weight_bias`` (L + S, 2I) and ``w2_weight_bias`` (L + S, H). ``x`` (T, H) all
    tokens, ``topk_weights`` (T, K), ``local_ids`` (T, K) expert on this rank, -1 for another
    rank's.
    """
    with expert_clock:
        tokens, k = (local_ids >= 0).nonzero(as_tuple=True)
        dtype = own_type(layer.w13_weight.dtype)
        expert = partial(_expert, layer, _activation(layer.moe_runner_config), dtype)
        chosen = topk_weights[tokens, k].float(), local_ids[tokens, k]
        rows = x.index_select(0, tokens)
        outputs = by_expert(expert, layer.w13_weight.shape[0], rows, *chosen)
        return added_up(outputs, tokens, x.shape[0])


def _activation(config: Any) -> Activation:
    """What comes between the two products, as ``moe_forward_native`` chooses it."""
    made: Activation
    if config.activation == "silu" and config.gemm1_alpha is not None:
        alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
        made = partial(swiglu_gpt_oss_sigmoid_alpha, gemm1_alpha=alpha, gemm1_limit=limit)
    elif config.activation == "situ":
        beta = 4.0 if config.gemm1_alpha is None else config.gemm1_alpha
        made = SituAndMul(beta=beta, linear_beta=config.gemm1_clamp_limit)
    else:
        made = {"silu": SiluAndMul, "gelu": GeluAndMul}[config.activation]()
    return made


def _expert(layer: Any, activation: Activation, dtype: torch.dtype, index: int) -> Expert:
    """Local expert ``index`` of ``layer``, computed in ``dtype``."""
    product = float32_product if dtype is torch.float32 else F.linear
    w13, w2 = layer.w13_weight[index].to(dtype), layer.w2_weight[index].to(dtype)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        inner = activation(_add_bias(layer, "w13", index, product(rows.to(dtype), w13)))
        return _add_bias(layer, "w2", index, product(inner, w2))

    return compute


def _add_bias(layer: Any, name: str, expert: int, product: torch.Tensor) -> torch.Tensor:
    """Add one expert's bias to ``product``; SGLang keeps biases in float32 and adds them in it."""
    bias = getattr(layer, f"{name}_weight_bias", None)
    return product if bias is None else (product.float() + bias[expert]).to(product.dtype)


def complete_device_module() -> None:
    """Give ``torch.cpu`` the functions that SGLang's expert recorder calls, where it has none.

    Target: ``torch.get_device_module()`` in ``eplb.expert_distribution``. There are no graphs to
    capture and no cache to empty on CPU. Verified with SGLang 0.5.23 and torch 2.13. Remove when
    torch has them or SGLang asks first.
    """
    for name, function in (("is_current_stream_capturing", _false), ("empty_cache", _nothing)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _false() -> bool:
    return False


def _nothing() -> None:
    return None
