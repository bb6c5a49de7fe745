"""New weights in a running server: refused before anything moves, where experts cannot follow.

Programs load them by the model's ``load_weights``, by a parameter's loader, or by vLLM's reload,
which first moves all layers away. Experts follow where no copy of them stays in a slot and their
kernel reads them as a checkpoint has them: loaders find a layer as vLLM made it, with masters in
the memory that is computed from. Other kernels, those on CPU among them, have an order of their
own. Verified with 0.32 and 0.33.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from ultraep_serve.errors import UnsupportedError


def refuse_new_weights(model: Any, layers: Sequence[RoutedExperts]) -> None:
    """Refuse other weights for ``model``, whose experts are ``layers``, whoever brings them."""
    model.load_weights = _refuse
    LAYERWISE_INFO[model] = _NeverReloaded(({}, {}), torch.get_default_device())
    for layer in layers:
        for parameter in layer.parameters():
            parameter.weight_loader = _refuse


def _refuse(*_: Any, **__: Any) -> None:
    raise UnsupportedError(
        "the kernel of the experts keeps them in an order of its own, or copies of them stay in "
        "slots, so weights cannot be replaced in a running server, which serves on with those it "
        "has; restart it with the new ones, or on GPUs use an unquantised model with "
        "--moe-backend triton and --slot-memory shared",
        otherwise="",
    )


class _NeverReloaded(LayerReloadingInfo):
    """What vLLM's reload knows of a model; it asks for it before it moves the first layer."""

    def can_load(self) -> bool:
        _refuse()
        return False
