"""FlashInfer's megakernels over masters and slots: one launch dispatches, computes and combines.

FlashInfer's layer (``moe_ep.MoEEpMegaLayer``) is made for a number of experts, and reads tensors of
its own. vLLM's parameters are views of them (``FlashInferMoeEp.expert_weight_views``). So where the
parameters have moved, FlashInfer's layer is made again over them as they are, in its order already
(``MegaConfig.transformed_weights``). All that is ours comes before the launch: ids are physical,
and copies have arrived (``stage``). Read in vLLM 0.32 and 0.33, and FlashInfer 0.7.2; not run.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn


class Megakernel:
    """What vLLM's experts call in place of their ``FlashInferMoeEp``."""

    def __init__(self, adapter: Any, parameters: Sequence[nn.Parameter]) -> None:
        """``adapter`` reads only ``parameters``, which may get rows for slots, or lose them."""
        self._adapter = adapter
        held = {parameter.data_ptr(): parameter for parameter in parameters}
        self._weights = [held[view.data_ptr()] for view in adapter.kernel_weights()]
        self._place = self._place_now()

    def __call__(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """The whole output (T, H) for ``topk_ids`` (T, K) of as many experts as there are rows."""
        if self._place_now() != self._place:
            self._make_again()
        output: torch.Tensor = self._adapter(hidden_states, topk_ids, topk_weights)
        return output

    def _make_again(self) -> None:
        """All ranks come here together: their parameters have moved before the same batch."""
        before, made = self._adapter, copy.copy(self._adapter)
        layer, made._mega_layer = before._mega_layer, None
        made._num_experts = self._weights[0].shape[0] * layer._bootstrap.world_size
        own = [tensor for pair in layer._transformed for tensor in pair]
        first, first_scale, second, second_scale = map(_as_kernel_has_it, self._weights, own)
        made._mega_layer = type(layer)(
            layer._bootstrap,
            replace(layer._fleet_params, num_experts=made._num_experts),
            None,
            replace(
                layer._mega_config,
                preprocess_weights=False,
                transformed_weights=((first, first_scale), (second, second_scale)),
            ),
        )
        made.warmup()
        before.destroy()  # after: the last one of a process ends what all of them share
        self._adapter, self._place = made, self._place_now()

    def _place_now(self) -> tuple[int, int]:
        return self._weights[0].data_ptr(), self._weights[0].shape[0]


def adapter_of(experts: object) -> Any:
    """What ``experts`` call FlashInfer's layer through; None where they are no megakernel."""
    return getattr(experts, "_adapter", None)


def reads_only(adapter: Any, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether all that the kernel reads of single experts is in ``parameters``."""
    weights, moving = adapter.kernel_weights(), {id(parameter) for parameter in parameters}
    scalars = adapter.expert_weight_views()[len(weights) :]
    addresses = {parameter.data_ptr() for parameter in parameters}
    return all(weight.data_ptr() in addresses for weight in weights) and all(
        id(scalar) in moving for scalar in scalars
    )


def _as_kernel_has_it(parameter: nn.Parameter, own: torch.Tensor) -> torch.Tensor:
    """View ``parameter`` by type and order of ``own``; undoes ``FlashInferMoeEp``'s view."""
    rows = parameter.data.view(own.dtype)
    return rows if own.is_contiguous() else rows.transpose(1, 2)
