"""SGLang's own dispatch and kernels, set to the number of physical experts.

They know physical experts already: of global ids, rank r owns ``num_local_experts`` from
``r * num_local_experts`` on, which with L + S of them is ``rank * (L + S) + local``. Nothing of
theirs is replaced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch, set_is_extend_in_batch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE, create_moe_dispatcher
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import get_deepep_mode, get_moe_a2a_backend
from sglang.srt.runtime_context import get_schedule
from torch import nn

from ultraep_serve.engines.common.execution import Execution, compute_in_parts
from ultraep_serve.engines.sglang.checks import check_cpu_balancing, check_device_execution
from ultraep_serve.engines.sglang.cpu_experts import compute_and_reduce

__all__ = ["CpuExperts", "DeviceExperts", "most_prefill_tokens"]


class _ResizedLayers(Execution[FusedMoE]):
    """``Execution`` with the part that is the same on CPU and GPU."""

    def resize(
        self,
        layers: Sequence[FusedMoE],
        parameters: Sequence[Sequence[nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        """See ``Execution.resize``.

        Runners read the numbers of experts from the layer's ``moe_runner_config``, which all its
        parts share, and SGLang changes it in place where a layer's experts change
        (``bind_full_expert_weights``). Dispatchers copy them when they are made, so they are made
        anew, as SGLang makes them; DeepEP's buffer is made for their number at the first dispatch,
        after all layers are set. Loading still sees the masters alone, so that weights can be
        loaded in place. Verified with 0.5.23.
        """
        for layer in layers:
            config, quant_config = layer.moe_runner_config, layer.dispatcher.quant_config
            config.num_experts, config.num_local_experts = after * layer.moe_ep_size, after
            layer.num_local_experts = after
            layer.dispatcher = create_moe_dispatcher(config, layer.quant_method)
            if quant_config:
                layer.dispatcher.set_quant_config(quant_config)
            if hasattr(layer, "_cutlass_swiglu_params"):
                _resize_activation(layer)


def _resize_activation(layer: FusedMoE) -> None:
    """Give FlashInfer's kernel its parameters of the activation for as many experts as there are.

    They are the same for all experts; SGLang makes them when it has loaded a layer
    (``UnquantizedFusedMoEMethod.process_weights_after_loading``).
    """
    from sglang.srt.layers.moe.moe_runner.flashinfer_cutlass import (
        materialize_swiglu_params_for_cutlass,
    )

    layer._cutlass_swiglu_params = materialize_swiglu_params_for_cutlass(
        layer.moe_runner_config, layer.num_local_experts, layer.w13_weight.device
    )


class CpuExperts(_ResizedLayers):
    """``Execution`` on CPU, where SGLang dispatches and the adapter computes."""

    def check(self, layer: FusedMoE) -> None:
        check_cpu_balancing(layer)

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        local = physical - layer.moe_ep_rank * layer.num_local_experts
        is_own = (local >= 0) & (local < layer.num_local_experts)
        return compute_and_reduce(layer, x, topk_weights, torch.where(is_own, local, -1))


def most_prefill_tokens() -> int:
    """How many tokens SGLang puts into a prefill batch; one longer prompt alone may have more."""
    chunk = get_schedule().chunked_prefill_size
    return int(chunk if chunk and chunk > 0 else get_schedule().max_prefill_tokens)


class DeviceExperts(_ResizedLayers):
    """``Execution`` where SGLang's kernels run."""

    def check(self, layer: FusedMoE) -> None:
        check_device_execution(layer)

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """Compute as in a prefill; DeepEP's buffer limits how many tokens go at once."""

        def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            chosen = StandardTopKOutput(weights, ids, router_logits=weights)
            output: torch.Tensor = layer.forward_impl(x, chosen)
            return output

        weights, ids = topk_weights.to(x.device), physical.to(x.device)
        with _in_prefill():
            return compute_in_parts(compute, _most_tokens(x.shape[0]), x, weights, ids)


def _most_tokens(num_tokens: int) -> int:
    """How many of ``num_tokens`` tokens of a rank SGLang dispatches at once in a prefill."""
    if not get_moe_a2a_backend().is_deepep():
        return num_tokens
    if not get_deepep_mode().resolve(is_extend_in_batch=True).is_low_latency():
        return num_tokens
    return min(num_tokens, int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()))


@contextmanager
def _in_prefill() -> Iterator[None]:
    """DeepEP's dispatcher asks for the phase; SGLang's own warm-ups tell it the same way."""
    before = get_is_extend_in_batch()
    set_is_extend_in_batch(True)
    try:
        yield
    finally:
        set_is_extend_in_batch(before)
