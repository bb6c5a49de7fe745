"""vLLM's native megakernel over masters and slots: DeepGEMM's MegaMoE, one launch for a layer.

It is in no layer that vLLM dispatches for, but in a module that models have in its place,
``DeepGemmMegaMoEExperts``. That reads its parameters, a row for each expert of this rank, in the
kernel's order, and ``num_experts``, of which its symmetric buffer is made at the first launch. So
slots are more rows and a larger number, and all else comes in a hook in front of the module: ids
are physical, and copies have arrived. Weights are loaded by other numbers, into masters. Read in
vLLM 0.33, whose code ran here with a reference of DeepGEMM; the kernel itself has not run. In 0.32
models have modules of their own, which keep what the kernel reads outside of their parameters.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import vllm.envs as envs
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import (
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)

from ultraep_serve.balance.agreement import SharedValues, unanimous
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.group import BalancedLayers, start_balancing
from ultraep_serve.engines.common.loaded import (
    EngineRank,
    Execution,
    LoadedLayers,
    require_one_number,
)
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.engines.vllm.checks import MEGA_MOE, largest_batch
from ultraep_serve.engines.vllm.layer_checks import check_mega_moe
from ultraep_serve.engines.vllm.stage import VllmFlow
from ultraep_serve.types import ExpertShape, TokenView


def mega_moe_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model``, in the order they run, whose experts the megakernel computes."""
    return [module for module in model.modules() if type(module) is MEGA_MOE]


def balance_mega_moe(
    config: BalanceConfig, vllm_config: VllmConfig, layers: Sequence[nn.Module], own: EngineRank
) -> BalancedLayers:
    """As ``model.balance``, of ``mega_moe_layers``. Each rank brings tokens of its own."""
    with unanimous(own.group, config):
        loaded = _described(config, vllm_config, layers)
    is_one_engine = vllm_config.parallel_config.data_parallel_size == 1
    flow = VllmFlow(TokenView.OWN, loaded.shape.num_ranks if is_one_engine else 0)
    return start_balancing(config, _MegaMoe(flow), loaded, own, flow)


def _described(
    config: BalanceConfig, vllm_config: VllmConfig, layers: Sequence[Any]
) -> LoadedLayers[nn.Module]:
    """What can be balanced as it is. Raises UnsupportedError for anything else."""
    first, parallel = layers[0], vllm_config.parallel_config
    require_one_number([layer.num_experts for layer in layers])
    for layer in layers:
        check_mega_moe(layer)
    return LoadedLayers(
        weights=[ExpertWeights(layer, _experts(layer)) for layer in layers],
        shared=[SharedValues.of(layer.prefix, (), "") for layer in layers],
        shape=ExpertShape(
            first.num_experts // first.num_local_experts,
            first.num_experts,
            config.slots,
            int(parallel.num_ubatches) if parallel.use_ubatching else 1,
        ),
        view=TokenView.OWN,
        experts_per_token=first.top_k,
        hidden_size=first.hidden_size,
        dtype=torch.bfloat16,
        largest_batch=largest_batch(vllm_config),
    )


def _experts(layer: Any) -> list[nn.Parameter]:
    """The parameters (L, ...) of single experts; which they are is vLLM's own contract."""
    movable = {weight.data_ptr() for weight in layer.get_expert_weights()}
    return [own for own in layer.parameters(recurse=False) if own.data_ptr() in movable]


class _MegaMoe(Execution[nn.Module]):
    """``Execution`` by the megakernel."""

    def __init__(self, flow: VllmFlow) -> None:
        self._flow = flow
        self._hooks: list[Any] = []

    def kernel(self, layer: nn.Module) -> object:
        return layer

    def compute(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """See ``Execution.compute``; a shared expert that vLLM fuses is in it."""
        given = (torch.split(part, layer.max_num_tokens) for part in (x, topk_weights, physical))
        # no batch's context: the padding in it is that of other tokens
        with torch.inference_mode(), self._flow.unbalanced(), override_forward_context(None):
            return torch.cat([layer(*part) for part in zip(*given, strict=True)])

    def give_slots(self, layers: Sequence[ExpertWeights[Any]], shape: ExpertShape) -> None:
        for index, weights in enumerate(layers):
            layer = weights.layer
            layer.num_experts = shape.num_ranks * shape.num_local
            self._hooks += [
                layer.register_forward_pre_hook(partial(self._before, index, weights)),
                layer.register_forward_hook(partial(self._behind, weights)),
            ]

    def take_slots(self, layers: Sequence[ExpertWeights[Any]], shape: ExpertShape) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        for weights in layers:
            weights.layer.num_experts = shape.num_logical_experts
        MEGA_MOE._symm_buffers.clear()  # which were made for slots

    def _before(
        self, index: int, weights: ExpertWeights[Any], _: nn.Module, given: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Replace the ids of vLLM's call, and wait: the kernel reads experts from its start."""
        x, topk_weights, ids, *rest = given
        physical = self._flow.route(index, _without_padding(ids))
        self._flow.receive()
        weights.show_slots()
        return (x, topk_weights, physical, *rest)

    def _behind(self, weights: ExpertWeights[Any], *_: Any) -> None:
        weights.masters_alone()
        self._flow.experts_done()
        self._flow.computed()


def _without_padding(ids: torch.Tensor) -> torch.Tensor:
    """``ids`` (T, K), -1 of tokens that vLLM has added to a batch; it leaves these out later."""
    if envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available():
        is_padding = get_forward_context().is_padding
        if is_padding is not None:
            return ids.masked_fill(is_padding[: ids.shape[0], None], -1)
    return ids
