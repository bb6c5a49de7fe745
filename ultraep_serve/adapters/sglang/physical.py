"""SGLang's own dispatch and kernels, told how many physical experts there are.

They know physical experts already: of global ids, rank r owns ``num_local_experts`` from
``r * num_local_experts`` on, which with L + S of them is ``rank * (L + S) + local``.
"""

from collections.abc import Sequence

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE, create_moe_dispatcher
from torch import nn

from ultraep_serve.adapters.execution import drop_slots
from ultraep_serve.types import ExpertShape

__all__ = ["PhysicalExperts", "tell_of_experts"]


class PhysicalExperts:
    """What of ``Execution`` is the same on CPU and GPU."""

    def give_slots(self, layers: Sequence[FusedMoE], shape: ExpertShape) -> None:
        tell_of_experts(layers, shape.num_ranks * shape.num_local, shape.num_local)

    def take_slots_back(
        self,
        layers: Sequence[FusedMoE],
        parameters: Sequence[Sequence[nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        drop_slots(parameters, shape)
        tell_of_experts(layers, shape.num_logical_experts, shape.num_masters)


def tell_of_experts(layers: Sequence[FusedMoE], num_experts: int, num_local: int) -> None:
    """Have ``layers`` serve ``num_experts`` experts, ``num_local`` of them on this rank.

    Runners read both numbers from the layer's ``moe_runner_config``, which all its parts share, and
    SGLang changes it in place where a layer's experts change (``bind_full_expert_weights``).
    Dispatchers copy them when they are made, so they are made anew, as SGLang makes them; DeepEP's
    buffer is made for their number at the first dispatch, after all layers are told. Loading goes
    on to know the masters alone, so that weights can be loaded in place. Verified with 0.5.23.
    """
    for layer in layers:
        config, quant_config = layer.moe_runner_config, layer.dispatcher.quant_config
        config.num_experts, config.num_local_experts = num_experts, num_local
        layer.num_local_experts = num_local
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
