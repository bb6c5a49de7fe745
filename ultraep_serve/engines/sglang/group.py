"""The MoE layers of one scheduler process, joined into one balancer once the model is loaded."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.layers.moe.utils import filter_moe_weight_param_global_expert
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import is_cpu
from torch import nn

from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.cuda.recording import is_capturing
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.execution import Execution, LoadedLayers, start_balancing, summed
from ultraep_serve.engines.common.setup import Batch, EngineRank, require_one_number
from ultraep_serve.engines.sglang.checks import check_layer
from ultraep_serve.engines.sglang.quantised import shared_values
from ultraep_serve.errors import POLICY_OFF, UnsupportedError
from ultraep_serve.types import ExpertShape, TokenView

__all__ = ["ExpertGroup", "complete_outputs", "expert_layers", "moe_layers"]

logger = logging.getLogger(__name__)


class ExpertGroup:
    """All MoE layers of this rank, which the adapter has taken over."""

    def __init__(
        self, config: BalanceConfig, model: nn.Module, execution: Execution[FusedMoE]
    ) -> None:
        """Take over ``model``'s layers, whose weights are final.

        Returns when all ranks have come this far. Raises UnsupportedError when one layer cannot be
        balanced; SGLang can serve without balancing then.
        """
        layers = moe_layers(model)
        if not layers:
            raise UnsupportedError(
                f"{type(model).__name__} has no experts in SGLang's FusedMoE layers, which alone "
                "can be balanced"
            )
        for layer in layers:
            check_layer(layer)
            execution.check(layer)
        require_one_number([layer.num_experts for layer in layers])
        self._layers = {layer: index for index, layer in enumerate(layers)}
        self._not_routed = set(layers)  # layers that no prefill has passed
        self._is_loading = True
        config_of_model = getattr(model, "config", None)
        # Models with zero experts (LongCat) send their assignments to expert 0, with weight 0.
        self.has_zero_experts = bool(getattr(config_of_model, "zero_expert_num", 0))
        first, parameters = layers[0], [movable_parameters(layer) for layer in layers]
        loaded = LoadedLayers(
            layers=layers,
            parameters=parameters,
            shared=[shared_values(layer) for layer in layers],
            shape=ExpertShape(first.moe_ep_size, first.num_experts, config.slots),
            view=_view_of(first),
            experts_per_token=first.top_k,
            hidden_size=first.hidden_size,
            dtype=first.params_dtype,
        )
        parallel = get_parallel()
        ranks, world = parallel.moe_ep_group, parallel.world_group.cpu_group
        others = [world, parallel.tp_group.cpu_group]
        store = world.get_group_store()
        group = EngineGroup(ranks.cpu_group, ranks.device_group, store, others)
        own = EngineRank("sglang", first.moe_ep_rank, group)
        complete = _complete(first, group.on_host if is_cpu() else group.on_device)
        self._balanced = start_balancing(config, execution, loaded, own, complete)
        self._in_place = list(map(_InPlace, layers, parameters))

    def __contains__(self, layer: FusedMoE) -> bool:
        """Whether ``layer`` is balanced; a draft model's and replicated experts are not."""
        return layer in self._layers

    def route(self, layer: FusedMoE, topk_ids: torch.Tensor, batch_tokens: int) -> torch.Tensor:
        """Physical ids (T, K) for ``layer``'s logical ``topk_ids`` (T, K), of the same type.

        ``batch_tokens`` is the batch's token count over all ranks. CUDA graphs
        are captured once for all batches that replay them, so they take the identity. Raises
        UnsupportedError when the layer's weights are not where the balancer moves them.
        """
        self._not_routed.discard(layer)
        index = self._layers[layer]
        self._in_place[index].require()
        tokens = 0 if is_capturing(topk_ids.device) else batch_tokens
        return self._balanced.route(index, topk_ids, Batch(tokens))

    def computed(self) -> None:
        """Take note that the layer that was routed last has been computed."""
        self._balanced.computed()

    def check_all_routed(self) -> None:
        """Raise UnsupportedError unless a prefill with tokens has routed every layer.

        A model that computes a layer's experts in a way of its own would take physical ids for
        logical ones. SGLang's warm-up request is the first such batch.
        """
        for layer in self._not_routed:
            raise UnsupportedError(
                f"{layer.layer_name} cannot be balanced: the model did not call it in a "
                "prefill, or not through FusedMoE.forward_impl",
                otherwise=POLICY_OFF,
            )

    def check_adopted(self, model: nn.Module) -> None:
        """Raise UnsupportedError unless every MoE layer of ``model`` still has its slots."""
        for layer in moe_layers(model):
            if layer not in self._layers:
                raise UnsupportedError(
                    f"{layer.layer_name} is not balanced: it came after loading; "
                    "start the server anew"
                )
            self._in_place[self._layers[layer]].require()

    def mark_ready(self) -> None:
        """Say that this rank balances."""
        self._balanced.mark_ready(logger)

    def end_loading(self) -> None:
        """Take note that a prefill batch has run, behind all that SGLang does before it serves.

        In the first one, mostly SGLang's own warm-up request, kernels may still be compiled.
        """
        if self._is_loading:
            self._is_loading = False
            self._balanced.end_loading(logger)


class _InPlace:
    """Whether a layer's expert tensors are still those that have slots behind them.

    SGLang can load weights anew while it serves (``/update_weights_from_disk`` and others). What is
    loaded into the same memory is balanced as it is; what is made anew has no slots.
    """

    def __init__(self, layer: FusedMoE, parameters: Sequence[nn.Parameter]) -> None:
        self._layer = layer
        movable = {id(parameter) for parameter in parameters}
        names = [name for name, own in layer.named_parameters() if id(own) in movable]
        self._tensors = attrgetter(*names)  # of two weights at least, so that it gives a tuple
        self._addresses = self._now()

    def require(self) -> None:
        """Raise UnsupportedError if one was replaced."""
        if self._now() != self._addresses:
            raise UnsupportedError(
                f"{self._layer.layer_name} is not balanced: its weights were replaced after "
                "loading; start the server anew"
            )

    def _now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors(self._layer)]


def _complete(layer: FusedMoE, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes the whole output of a part.

    Ranks that have all tokens add their parts up, unless SGLang's layers do so themselves
    (``FusedMoE.forward_impl``, with ``reduce_results``; on CPU the adapter leaves that out). A
    dispatcher brings every rank the whole output of its own tokens.
    """
    is_whole = layer.reduce_results and not is_cpu()
    if _view_of(layer) is TokenView.OWN or is_whole:
        return lambda output: output
    return partial(summed, group=group)


def _view_of(layer: FusedMoE) -> TokenView:
    """Return whose tokens the ranks of ``layer`` see.

    Without a dispatcher of its own every rank has all tokens, with attention data parallelism too:
    SGLang gathers them before the layer.
    """
    return TokenView.SHARED if type(layer.dispatcher) is StandardDispatcher else TokenView.OWN


def complete_outputs(model: nn.Module) -> None:
    """Have models of SGLang's Transformers backend add up what expert-parallel ranks compute.

    Where a model has shared experts, whose output is complete on every rank, the backend leaves the
    sum of the routed ones to a step that only tensor parallelism takes
    (``TransformersFusedMoE.maybe_all_reduce_tensor_model_parallel``). Verified with 0.5.23.
    """
    for module in model.modules():
        if type(module).__name__ == "TransformersFusedMoE":
            layer: Any = module.experts
            if layer.moe_ep_size > 1 and type(layer.dispatcher) is StandardDispatcher:
                layer.reduce_results = True


def expert_layers(model: nn.Module) -> list[FusedMoE]:
    """Find layers spread over the expert-parallel ranks; replicated ones have nothing to move."""
    found = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return [layer for layer in found if layer.moe_ep_size > 1]


def moe_layers(model: nn.Module) -> list[FusedMoE]:
    """MoE layers to balance, in the order they run; draft layers stay as they are."""
    layers = [layer for layer in expert_layers(model) if not layer.is_draft]
    return sorted(layers, key=lambda layer: layer.layer_id)


def movable_parameters(layer: FusedMoE) -> list[nn.Parameter]:
    """All parameters that make up ``layer``'s experts, by SGLang's own rule for moving them.

    Raises UnsupportedError for another tensor with one entry per expert: it would be left behind
    when the expert is copied.
    """
    num_local = layer.num_local_experts
    movable = {
        parameter.data_ptr()
        for name, parameter in layer.named_parameters()
        if filter_moe_weight_param_global_expert(name, parameter, num_local)
    }
    per_expert = [
        *layer.named_per_expert_tensors(num_local),
        *((name, own) for name, own in layer.named_parameters() if own.shape[:1] == (num_local,)),
    ]
    for name, tensor in per_expert:
        if tensor.data_ptr() not in movable:
            raise UnsupportedError(
                f"{layer.layer_name}: expert tensor {name} {tuple(tensor.shape)} cannot be moved; "
                "start the server anew"
            )
    return [parameter for parameter in layer.parameters() if parameter.data_ptr() in movable]
