"""A layer's kernel over masters and slots, beside the layer, which stays as vLLM made it.

vLLM's kernels know physical experts already: global ids, this rank's part of which is given by an
expert map, so many local experts as the weights have rows. So they are made once more, for
R * (L + S) experts and L + S local ones, from what the layer's own kernel was made of; vLLM's
linear placement puts them at ``rank * (L + S) + local``. The layer keeps its E experts, its map and
its L rows, by which weights are loaded and read. On CPU kernels are of ours (``host``). Verified
with 0.32 and 0.33.
"""

import copy
import inspect
from functools import lru_cache
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators.all2all import FlashInferNVLinkOneSidedManager
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform

from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.engines.vllm.expert_tensors import fit_shared_values, with_own_scales
from ultraep_serve.engines.vllm.megakernel import Megakernel, adapter_of
from ultraep_serve.engines.vllm.stage import BalancedStage, VllmFlow
from ultraep_serve.types import ExpertShape


def with_slots(
    weights: ExpertWeights[RoutedExperts], index: int, shape: ExpertShape, flow: VllmFlow
) -> mk.FusedMoEKernel:
    """A kernel of L + S local experts for MoE layer ``index``, whose dispatch ``flow`` balances.

    Parameters get their rows for slots later: kernels combine scales when they are made.
    """
    layer = weights.layer
    if current_platform.is_cpu():
        stage, experts = plain_stage(layer), layer.quant_method.moe_kernel.fused_experts
        stage.num_local = shape.num_local
    else:
        stage, experts = _made_again(weights, shape)
    kernel = mk.FusedMoEKernel(BalancedStage(stage, index, flow), experts)
    kernel.impl = _OverSlots(kernel.impl, layer, shape, flow)
    return kernel


def plain_stage(layer: RoutedExperts) -> Any:
    """The stage of ``layer``'s kernel, without balancing."""
    stage = layer.quant_method.moe_kernel.prepare_finalize
    return stage.wrapped if isinstance(stage, BalancedStage) else stage


class _OverSlots(mk.FusedMoEKernelModularImpl):
    """What runs a kernel, with numbers and weights of physical experts for those of the layer."""

    def __init__(
        self,
        made: mk.FusedMoEKernelModularImpl,
        layer: RoutedExperts,
        shape: ExpertShape,
        flow: VllmFlow,
    ) -> None:
        super().__init__(made.prepare_finalize, made.fused_experts)
        self._flow = flow
        self._weights = layer.w13_weight, layer.w2_weight
        self._num_experts, moe = shape.num_ranks * shape.num_local, layer.moe_config
        _, expert_map, _ = determine_expert_map(moe.ep_size, moe.ep_rank, self._num_experts)
        self._expert_map = expert_map.to(layer.w13_weight.device)

    def apply(self, **given: Any) -> Any:
        """See vLLM's own; a kernel that takes no expert map gets none.

        The balancer, which may have tokens computed once more, is told when nothing of the layer is
        open any more: neither workspace nor a dispatch's handle.
        """
        w1, w2 = self._weights
        expert_map = None if given["expert_map"] is None else self._expert_map
        physical = {"w1": w1, "w2": w2, "expert_map": expert_map}
        output = super().apply(**given | physical | {"global_num_experts": self._num_experts})
        self._flow.computed()
        return output


def _made_again(
    weights: ExpertWeights[RoutedExperts], shape: ExpertShape
) -> tuple[mk.FusedMoEPrepareAndFinalizeModular, mk.FusedMoEExpertsModular]:
    """Stage and experts as those of the layer's kernel, for L + S experts on this rank.

    As vLLM's elastic expert parallelism makes them (``fused_moe.eep_reconfigure``): weights are in
    the kernel's order already.
    """
    moe = copy.copy(weights.layer.moe_config)
    moe.num_experts, moe.num_local_experts = shape.num_ranks * shape.num_local, shape.num_local
    experts = weights.layer.quant_method.moe_kernel.fused_experts
    scales = with_own_scales(experts.quant_config)
    unquantised = moe.in_dtype if experts.expects_unquantized_inputs else None
    stage = _stage(moe=moe, quant_config=scales, input_dtype=unquantised)
    own = {"moe_config": moe, "quant_config": scales}
    names = inspect.signature(type(experts)).parameters
    given = {name: getattr(experts, name) for name in names if hasattr(experts, name)}
    made = type(experts)(**given | {name: own[name] for name in own if name in names})
    for name, value in vars(experts).items():
        if isinstance(value, torch.nn.Parameter):  # of the layer, set once weights were in order
            setattr(made, name, value)
    if (adapter := adapter_of(experts)) is None:
        fit_shared_values(made, weights.parameters, shape)
    else:  # the layer's own kernel has it too, should it be taken back: the weights move
        made._adapter = experts._adapter = Megakernel(adapter, weights.parameters)
    return stage, made


def _stage(moe: FusedMoEConfig, **given: Any) -> mk.FusedMoEPrepareAndFinalizeModular:
    """What dispatches to ``moe``'s experts.

    FlashInfer's one-sided manager serves one number of experts, and all layers, those of a draft
    model too. So stages with slots share another; FlashInfer gives both the same workspace.
    """
    communicator = get_ep_group().device_communicator
    manager = getattr(communicator, "all2all_manager", None)
    if isinstance(manager, FlashInferNVLinkOneSidedManager):
        communicator.all2all_manager = _another(manager, moe.num_experts)
    try:
        return maybe_make_prepare_finalize(moe=moe, allow_new_interface=True, **given)
    finally:
        if manager is not None:
            communicator.all2all_manager = manager


@lru_cache(maxsize=1)
def _another(manager: FlashInferNVLinkOneSidedManager, num_experts: int) -> Any:
    return type(manager)(manager.cpu_group)
