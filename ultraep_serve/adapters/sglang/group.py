"""The MoE layers of one scheduler process, joined into one balancer once the model is loaded."""

import functools
import logging

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from torch import nn

from ultraep_serve.adapters.joining import JoinedLayers, balanced_ids, expert_parameters
from ultraep_serve.adapters.sglang.checks import check_cpu_execution, check_layer
from ultraep_serve.adapters.sglang.cpu_experts import compute_and_reduce
from ultraep_serve.balancer import TokenView
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import ExpertShape

__all__ = ["ExpertGroup", "moe_layers"]

logger = logging.getLogger(__name__)


class ExpertGroup:
    """All MoE layers of this rank, taken over; every rank sees all tokens."""

    def __init__(self, config: BalanceConfig, model: nn.Module) -> None:
        """Take over ``model``'s layers, whose weights are final.

        Returns when all ranks have come this far. Raises UnsupportedError when one layer cannot be
        balanced; nothing has been changed then.
        """
        layers = moe_layers(model)
        if not layers:
            raise UnsupportedError(
                f"{type(model).__name__} has no experts; serve it with --policy off"
            )
        for layer in layers:
            check_layer(layer)
            check_cpu_execution(layer)
        first = layers[0]
        shape = ExpertShape(first.moe_ep_size, first.num_experts, config.num_replica_slots)
        self._indices = {layer: index for index, layer in enumerate(layers)}
        self._rank = first.moe_ep_rank
        self._joined = JoinedLayers(
            config=config,
            shape=shape,
            view=TokenView.SHARED,
            layers=[movable_parameters(layer) for layer in layers],
            rank=self._rank,
            engine="sglang",
            run_layer=functools.partial(_run_layer, first, shape),
        )
        for layer in layers:
            self._widen_dispatch(layer)

    def route(self, layer: FusedMoE, topk_ids: torch.Tensor, batch_tokens: int) -> torch.Tensor:
        """Physical ids (T, K) for ``layer``'s logical ``topk_ids`` (T, K); see Balancer.route."""
        return self._joined.route(self._indices[layer], topk_ids, batch_tokens)

    def computed(self) -> None:
        """The layer that was routed last has been computed."""
        self._joined.computed()

    def check_adopted(self, model: nn.Module) -> None:
        """Raise UnsupportedError unless every MoE layer of ``model`` still has its slots."""
        num_local = self._joined.shape.num_local
        for layer in moe_layers(model):
            if layer not in self._indices or layer.w13_weight.shape[0] != num_local:
                raise UnsupportedError(
                    f"{layer.layer_name} is not balanced: its weights were replaced after loading; "
                    "serve without balancing: --on-unsupported=off"
                )

    def mark_ready(self) -> None:
        """Say that this rank balances."""
        self._joined.mark_ready()
        if self._rank == 0:
            self._joined.log_ready(logger)

    def _widen_dispatch(self, layer: FusedMoE) -> None:
        """Have ``layer``'s dispatcher map physical ids, slots included, to local experts.

        Its table is made at the first use from these sizes. SGLang changes them the same way where
        a layer's experts change (``FusedMoE.bind_full_expert_weights``). Verified with 0.5.23.
        """
        dispatcher, shape = layer.dispatcher, self._joined.shape
        dispatcher.num_experts = shape.num_ranks * shape.num_local
        dispatcher.num_local_experts = shape.num_local
        dispatcher.num_local_routed_experts = shape.num_local
        dispatcher.local_expert_mapping = None


def moe_layers(model: nn.Module) -> list[FusedMoE]:
    """MoE layers in the order they run."""
    found = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return sorted(found, key=lambda layer: layer.layer_id)


def movable_parameters(layer: FusedMoE) -> list[nn.Parameter]:
    """All parameters that make up ``layer``'s experts, by SGLang's own rule for moving them.

    Raises UnsupportedError for another tensor with one entry per expert.
    """
    num_local = layer.num_local_experts
    movable = {
        parameter.data_ptr()
        for name, parameter in layer.named_parameters()
        if filter_moe_weight_param_global_expert(name, parameter, num_local)
    }
    for name, tensor in layer.named_per_expert_tensors(num_local):
        if tensor.data_ptr() not in movable:
            raise UnsupportedError(
                f"{layer.layer_name}: expert tensor {name} {tuple(tensor.shape)} cannot be moved; "
                "serve without balancing: --on-unsupported=off"
            )
    return expert_parameters(layer, layer.layer_name, num_local, movable)


def _run_layer(layer: FusedMoE, shape: ExpertShape, num_assignments: int) -> None:
    """Compute ``layer`` for a perfectly balanced batch, for the cost model."""
    ids = balanced_ids(shape, num_assignments * shape.num_ranks, layer.top_k)
    local = ids - layer.moe_ep_rank * shape.num_local
    is_own = (local >= 0) & (local < shape.num_local)
    x = torch.ones(ids.shape[0], layer.hidden_size, dtype=layer.w13_weight.dtype)
    own = torch.where(is_own, local, -1)
    compute_and_reduce(x, torch.ones(ids.shape), own, layer.w13_weight, layer.w2_weight)
