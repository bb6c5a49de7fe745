"""Two kinds of vLLM's layers become ours when they are put into a model.

``RoutedExperts.forward_modular`` sits between routing and dispatch, for tensor and data parallelism
alike. Models bring subclasses of it, which vLLM's registry of layers, by name, does not reach;
torch's own hook on the registration of modules sees them all. The embedding is there in models
without experts too, which are refused.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.guard import SETTING
from ultraep_serve.engines.common.process import repeated_at_exit
from ultraep_serve.engines.common.rendezvous import refuse_or_serve_plainly
from ultraep_serve.engines.vllm.checks import (
    check_checkpoint,
    check_engine,
    is_primary,
    without_experts,
)
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy

if TYPE_CHECKING:
    from ultraep_serve.engines.vllm.group import ExpertGroup

__all__ = [
    "CheckedEmbedding",
    "CpuRoutedExperts",
    "DeviceRoutedExperts",
    "config_of",
    "substitute",
    "take_over",
]

logger = init_logger("vllm.ultraep_serve")

_layers: list["BalancedRoutedExperts"] = []  # by handle, for the operator; lives with the process
_hook: RemovableHandle | None = None


class BalancedRoutedExperts(RoutedExperts):
    """vLLM's routed experts, balanced over the ranks of their expert-parallel group.

    Instances are made by vLLM, of whatever class the model chose; see ``take_over``.
    """

    _group: "ExpertGroup"
    _handle: int  # in ``_layers``
    _index: int  # among the group's layers, known once the weights are final
    _has_zero_experts: bool  # chosen ones that compute nothing come as expert 0 with weight 0

    def update_param_tp_status(self) -> None:
        """Take the weights over; vLLM's loader calls this where a layer's weights are final.

        Target: ``model_loader.utils.process_weights_after_loading``, which calls it on every layer
        that has it, after the quantisation method's own post-processing. In 0.32 and 0.33.
        """
        with repeated_at_exit():
            self._index = self._group.add(self)


class CpuRoutedExperts(BalancedRoutedExperts):
    """Balanced experts on CPU, where the adapter also dispatches and combines."""

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed output for ``x`` (T, H); see ``RoutedExperts.forward_modular``.

        CPU models are compiled through this method, so its work is an opaque operator: a compiled
        model contains one node for it and nothing of what cannot be traced.
        """
        if not self.use_ep:
            plain: torch.Tensor = super().forward_modular(
                x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
            return plain
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        if self._has_zero_experts:
            topk_ids = topk_ids.masked_fill(topk_weights == 0, -1)
        routed: torch.Tensor = _routed_experts(x, topk_weights, topk_ids, self._handle)
        return routed


class DeviceRoutedExperts(BalancedRoutedExperts):
    """Balanced experts on a GPU, where vLLM's own modular kernel runs on physical ids."""

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed output for ``x`` (T, H); see ``RoutedExperts.forward_modular``.

        No operator of ours is needed: on a GPU the runner's own ``vllm::moe_forward`` is opaque and
        calls this, so torch.compile sees nothing of it. It is no splitting point of piecewise CUDA
        graphs, so batches that vLLM replays, whole or in pieces, do what was captured: the identity
        (``ExpertGroup.batch``). Batches larger than vLLM captures
        (``--max-cudagraph-capture-size`` tokens of a rank) come through here every time. Shared
        experts overlap as vLLM has them, in its kernel or on a stream of their own: their weights
        are never moved.
        """
        group, physical = self._group, topk_ids
        if group.balanced is not None and self.use_ep:
            nothing = topk_weights == 0 if self._has_zero_experts else None
            logical = topk_ids if nothing is None else topk_ids.masked_fill(nothing, -1)
            physical = group.balanced.route(self._index, logical, group.batch(topk_ids))
            if nothing is not None:
                physical = physical.masked_fill(nothing, 0)  # as vLLM has it: expert 0's master
        routed: torch.Tensor = super().forward_modular(
            x, topk_weights, physical, shared_experts, shared_experts_input
        )
        group.computed()
        return routed


@torch.library.custom_op("ultraep_serve::routed_experts", mutates_args=())
def _routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, handle: int
) -> torch.Tensor:
    layer = _layers[handle]
    group = layer._group
    if group.balanced is None:
        return group.compute(layer._index, x, topk_weights, group.plain_ids(topk_ids))
    physical = group.balanced.route(layer._index, topk_ids, group.batch(topk_ids))
    output = group.compute(layer._index, x, topk_weights, physical)
    group.computed()
    return output


@_routed_experts.register_fake
def _routed_experts_shape(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, handle: int
) -> torch.Tensor:
    return torch.empty_like(x)


class CheckedEmbedding(VocabParallelEmbedding):
    """vLLM's embedding, which checks once that its model has experts to balance."""

    def update_param_tp_status(self) -> None:
        """Check, see ``BalancedRoutedExperts``; the whole model is built when this is called."""
        super().update_param_tp_status()
        self.__class__ = VocabParallelEmbedding
        with repeated_at_exit():
            _check_has_experts()


def substitute() -> None:
    """Have the layers above in the place of vLLM's own wherever a model is built.

    Calling twice is harmless.
    """
    global _hook
    if _hook is None:
        _hook = register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, _name: str, module: nn.Module | None) -> None:
    """Take over ``module``, which was made a part of ``parent``, if it is one of the two kinds."""
    if type(module) is VocabParallelEmbedding:
        module.__class__ = CheckedEmbedding
        with repeated_at_exit():
            _check_checkpoint()
    elif isinstance(module, RoutedExperts) and not isinstance(module, BalancedRoutedExperts):
        router = getattr(parent, "router", None)
        take_over(module, has_zero_experts=isinstance(router, ZeroExpertRouter))


def take_over(layer: RoutedExperts, *, has_zero_experts: bool = False) -> None:
    """Have ``layer`` balanced if the model that is being built is to be.

    It gets a class of its own that puts ours before the one it has.
    """
    with repeated_at_exit():
        group = _group_of_model()
    if group is None:
        return
    ours = CpuRoutedExperts if current_platform.is_cpu() else DeviceRoutedExperts
    layer.__class__ = _put_before(ours, layer.__class__)
    layer._group, layer._index, layer._handle = group, -1, len(_layers)
    layer._has_zero_experts = has_zero_experts
    _layers.append(layer)
    group.expect_layer()


@functools.cache
def _put_before(ours: type, kind: type) -> type:
    return ours if kind is RoutedExperts else type(kind.__name__, (ours, kind), {})


def config_of(vllm_config: VllmConfig) -> BalanceConfig | None:
    """What was asked for in ``vllm_config`` or the environment, where there is something to do.

    Raises ConfigError for wrong settings, UnsupportedError for an engine this adapter was not
    verified with.
    """
    given = vllm_config.additional_config
    setting = given.get(SETTING) if isinstance(given, Mapping) else None
    config = BalanceConfig.chosen(setting, f"additional_config[{SETTING!r}]")
    if config is None or (config.policy is Policy.OFF and not current_platform.is_cpu()):
        return None  # vLLM's own expert parallelism works on a GPU
    try:
        told = check_engine(config.on_newer_engine)
    except UnsupportedError as error:
        refuse_or_serve_plainly(error, config, logger, is_primary=is_primary(vllm_config))
        return None
    if told and is_primary(vllm_config):
        logger.warning_once("ultraep: %s", told)
    return config


def _group_of_model() -> "ExpertGroup | None":
    """The group of the model that is being built: one per vLLM configuration.

    The balancer is imported only now: after calling the plugins, a vLLM worker scans all loaded
    modules for Triton kernels and stumbles over numba's (``triton_utils.dispatcher.
    _rebind_kernels`` takes llvmlite's library object for one with a ``__dict__``). Seen in 0.32.
    """
    vllm_config = get_current_vllm_config()
    groups = [layer._group for layer in _layers]
    for group in groups:
        if group.vllm_config is vllm_config:
            return group
    config = config_of(vllm_config)
    if config is None:
        return None
    if any(is_draft_of(group.vllm_config, vllm_config) for group in groups):
        if not current_platform.is_cpu():
            return None
        config = config.replace(policy=Policy.OFF)
    elif any(group.balanced is not None for group in groups):
        raise UnsupportedError(
            "this process balances another model already; serve one of them with policy off",
            otherwise="",
        )
    from ultraep_serve.engines.vllm.group import ExpertGroup

    return ExpertGroup(config, vllm_config)


def is_draft_of(target: VllmConfig, other: VllmConfig) -> bool:
    """Whether ``other`` is that of a draft model, which vLLM loads after its ``target``.

    A draft model gets a configuration of its own and shares the register of layers.
    """
    registers = (config.compilation_config.static_forward_context for config in (target, other))
    first, second = registers
    return target is not other and first is second


def _check_checkpoint() -> None:
    """Refuse a model that this CPU cannot compute before its experts are made and loaded."""
    vllm_config = get_current_vllm_config()
    if vllm_config.parallel_config.enable_expert_parallel and config_of(vllm_config) is not None:
        check_checkpoint(vllm_config)


def _check_has_experts() -> None:
    """Refuse a model without experts that vLLM routes."""
    vllm_config = get_current_vllm_config()
    if vllm_config.compilation_config.static_all_moe_layers:
        return  # all of them ours; a draft model without experts has its target's here
    config = config_of(vllm_config)
    if config is None or config.policy is Policy.OFF:
        return
    error = without_experts(vllm_config)
    refuse_or_serve_plainly(error, config, logger, is_primary=is_primary(vllm_config))
