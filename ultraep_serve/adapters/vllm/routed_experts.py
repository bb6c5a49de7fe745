"""The seam: a subclass of vLLM's ``RoutedExperts`` in the place vLLM provides for one.

``forward_modular`` sits between routing and dispatch, for tensor and data parallelism alike.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.platforms import current_platform

from ultraep_serve.adapters.vllm.checks import check_engine
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy

if TYPE_CHECKING:
    from ultraep_serve.adapters.vllm.group import ExpertGroup

__all__ = ["CpuRoutedExperts", "DeviceRoutedExperts", "substitute"]

logger = init_logger("vllm.ultraep_serve")

_layers: list["BalancedRoutedExperts"] = []  # by handle, for the operator; lives with the process


class BalancedRoutedExperts(RoutedExperts):
    """vLLM's routed experts, balanced over the ranks of their expert-parallel group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group = _group_of_model()
        self._handle = len(_layers)
        self._index = -1  # among the group's layers, known once the weights are final
        _layers.append(self)

    def update_param_tp_status(self) -> None:
        """Take the weights over; vLLM's loader calls this where a layer's weights are final.

        Target: ``model_loader.utils.process_weights_after_loading``, which calls it on every layer
        that has it, after the quantisation method's own post-processing. Verified with 0.32.
        """
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


def substitute() -> None:
    """Have vLLM build balanced experts wherever it would build ``RoutedExperts``.

    Uses ``PluggableLayer.register_oot``, vLLM's own registry for that; calling twice is harmless.
    Raises UnsupportedError for an engine this adapter was not verified with.
    """
    config = BalanceConfig.from_environment()
    if config is None or RoutedExperts.__name__ in op_registry_oot:
        return
    if config.policy is Policy.OFF and not current_platform.is_cpu():
        return  # vLLM's own expert parallelism works there
    try:
        check_engine()
    except UnsupportedError as error:
        if config.on_unsupported == "error":
            raise
        logger.warning("ultraep: serving without balancing: %s", error)
        return
    balanced = CpuRoutedExperts if current_platform.is_cpu() else DeviceRoutedExperts
    PluggableLayer.register_oot(balanced, name=RoutedExperts.__name__)


def _group_of_model() -> "ExpertGroup":
    """The group of the model that is being built: one per vLLM configuration.

    The balancer is imported only now: after calling the plugins, a vLLM worker scans all loaded
    modules for Triton kernels and stumbles over numba's (``triton_utils.dispatcher.
    _rebind_kernels`` takes llvmlite's library object for one with a ``__dict__``). Seen in 0.32.
    """
    from ultraep_serve.adapters.vllm.group import ExpertGroup

    vllm_config = get_current_vllm_config()
    if _layers and _layers[-1]._group.vllm_config is vllm_config:
        return _layers[-1]._group
    if _layers and _layers[-1]._group.balanced is not None:
        raise UnsupportedError(
            "this process balances another model already; draft models with experts are not there "
            "yet: serve with --policy off"
        )
    config = BalanceConfig.from_environment()
    assert config is not None, "substituted without a configuration"
    return ExpertGroup(config, vllm_config)
