"""Expert parallelism on CPU, which SGLang's own torch path does not survive.

SGLang marks assignments of other ranks with -1 and its plain torch experts then index with that.
So ``compute`` stands in for them, and ``HostDispatcher`` completes sums.

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
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.runtime_context import get_parallel

from ultraep_serve.engines.common.cpu_experts import (
    Expert,
    add_up,
    by_expert,
    float32_product,
    own_type,
)

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # of gate and up (N, 2I) to (N, I)
ACTIVATIONS = ("silu", "gelu", "situ")  # that SGLang's torch path has, all gated


class HostDispatcher(StandardDispatcher):
    """SGLang's own dispatcher, with the same sums over ranks wherever experts are computed.

    Parts of 16-bit models stay float32 until they are complete, over ranks too: the first rank's
    part is all of the sum then and the others' are zero, so that SGLang's own sum does not round it
    again. In batches of fewer tokens than ``min_batch_tokens`` nothing is computed elsewhere, and
    SGLang adds up by itself.
    """

    def __init__(self, moe_runner_config: Any, min_batch_tokens: int) -> None:
        super().__init__(moe_runner_config)
        self._dtype, self._min_batch_tokens = moe_runner_config.params_dtype, min_batch_tokens

    def combine(self, combine_input: Any) -> torch.Tensor:
        part: torch.Tensor = super().combine(combine_input)
        if self._dtype is not torch.float32 and part.shape[0] >= self._min_batch_tokens:
            group = get_parallel().moe_ep_group
            part = group.all_reduce(part)
            if group.rank_in_group:
                part.zero_()
        return part.to(self._dtype)


def compute(
    layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, local_ids: torch.Tensor
) -> torch.Tensor:
    """This rank's part of the output, (T, H) float32.

    ``layer`` is SGLang's, with ``w13_weight`` (L + S, 2I, H), ``w2_weight`` (L + S, H, I) and
    perhaps ``w13_weight_bias`` (L + S, 2I) and ``w2_weight_bias`` (L + S, H). ``x`` (T, H) all
    tokens, ``topk_weights`` (T, K), ``local_ids`` (T, K) expert on this rank, -1 for another
    rank's.
    """
    expert = partial(_expert, layer, _activation(layer.moe_runner_config))
    products = partial(by_expert, expert, layer.w13_weight.shape[0])
    total = torch.empty(x.shape, dtype=torch.float32)
    return add_up(products, x, topk_weights, local_ids, total)


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


def _expert(layer: Any, activation: Activation, index: int) -> Expert:
    """Local expert ``index`` of ``layer``."""
    dtype = own_type(layer.w13_weight.dtype)
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
    for name, answer in (("is_current_stream_capturing", False), ("empty_cache", None)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda answer=answer: answer)
