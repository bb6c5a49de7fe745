"""The seams: subclasses of two of vLLM's layers in the places vLLM provides for them.

``RoutedExperts.forward_modular`` sits between routing and dispatch, for tensor and data parallelism
alike. The embedding is the first layer of any model, also of one whose experts vLLM builds in other
ways, which is refused.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from ultraep_serve.adapters.guard import SETTING
from ultraep_serve.adapters.process import repeated_at_exit
from ultraep_serve.adapters.rendezvous import refuse_or_serve_plainly
from ultraep_serve.adapters.vllm.checks import check_engine, is_primary, unsupported_experts
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy

if TYPE_CHECKING:
    from ultraep_serve.adapters.vllm.group import ExpertGroup

__all__ = ["CheckedEmbedding", "CpuRoutedExperts", "DeviceRoutedExperts", "config_of", "substitute"]

logger = init_logger("vllm.ultraep_serve")

_layers: list["BalancedRoutedExperts"] = []  # by handle, for the operator; lives with the process


class BalancedRoutedExperts(RoutedExperts):
    """vLLM's routed experts, balanced over the ranks of their expert-parallel group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with repeated_at_exit():
            group = _group_of_model()
        if group is None:
            self.__class__ = RoutedExperts
            return
        self._group = group
        self._handle = len(_layers)
        self._index = -1  # among the group's layers, known once the weights are final
        _layers.append(self)

    def update_param_tp_status(self) -> None:
        """Take the weights over; vLLM's loader calls this where a layer's weights are final.

        Target: ``model_loader.utils.process_weights_after_loading``, which calls it on every layer
        that has it, after the quantisation method's own post-processing. In 0.32 and 0.33.
        """
        with repeated_at_exit():
            self._index = self._group.add(self)


class CpuRoutedExperts(BalancedRoutedExperts):
    """On CPU, where dispatch and combine are ours too."""

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
        routed: torch.Tensor = _routed_experts(x, topk_weights, topk_ids, self._handle)
        return routed


class DeviceRoutedExperts(BalancedRoutedExperts):
    """On a GPU, where vLLM's own modular kernel runs on physical ids."""

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
            physical = group.balanced.route(self._index, topk_ids, group.batch(topk_ids))
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
    """vLLM's embedding, which checks once that all experts of its model will be balanced."""

    _is_made = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_made = True

    def update_param_tp_status(self) -> None:
        """As that of ``BalancedRoutedExperts``; it is called at the end of ``__init__`` too.

        The whole model is built when the loader calls it, and no layer of experts was finished.
        """
        super().update_param_tp_status()
        if not self._is_made:
            return
        self.__class__ = VocabParallelEmbedding
        with repeated_at_exit():
            _check_all_will_be_balanced()


def substitute() -> None:
    """Have vLLM build the layers above wherever it would build its own.

    Uses ``PluggableLayer.register_oot``, vLLM's own registry for that; calling twice is harmless.
    """
    experts = CpuRoutedExperts if current_platform.is_cpu() else DeviceRoutedExperts
    for ours, name in (
        (experts, RoutedExperts.__name__),
        (CheckedEmbedding, VocabParallelEmbedding.__name__),
    ):
        if name not in op_registry_oot:
            PluggableLayer.register_oot(ours, name=name)


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
        check_engine()
    except UnsupportedError as error:
        refuse_or_serve_plainly(error, config, logger, is_primary=is_primary(vllm_config))
        return None
    return config


def _group_of_model() -> "ExpertGroup | None":
    """The group of the model that is being built: one per vLLM configuration.

    The balancer is imported only now: after calling the plugins, a vLLM worker scans all loaded
    modules for Triton kernels and stumbles over numba's (``triton_utils.dispatcher.
    _rebind_kernels`` takes llvmlite's library object for one with a ``__dict__``). Seen in 0.32.
    """
    vllm_config = get_current_vllm_config()
    if _layers and _layers[-1]._group.vllm_config is vllm_config:
        return _layers[-1]._group
    config = config_of(vllm_config)
    if config is None:
        return None
    if _layers and _layers[-1]._group.balanced is not None:
        raise UnsupportedError(
            "this process balances another model already; draft models with experts are not there "
            "yet: serve with policy off"
        )
    from ultraep_serve.adapters.vllm.group import ExpertGroup

    return ExpertGroup(config, vllm_config)


def _check_all_will_be_balanced() -> None:
    """Refuse a model with experts that are none of ours, or with none at all."""
    vllm_config = get_current_vllm_config()
    names = set(vllm_config.compilation_config.static_all_moe_layers)
    if names <= {layer.layer_name for layer in _layers} and _layers:
        return  # without names: a draft model without experts
    config = config_of(vllm_config)
    if config is None or config.policy is Policy.OFF:
        return
    error = unsupported_experts(vllm_config)
    refuse_or_serve_plainly(error, config, logger, is_primary=is_primary(vllm_config))
