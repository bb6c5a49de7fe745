"""MoE layers as vLLM builds them for a GPU: configurations, expert maps, quantisation its own.

What a GPU would bring stands in: see ``vllm_gpu`` and ``vllm_transports``.
"""

from typing import Any

import torch
from vllm.config import KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from tests.support.experts import NUM_EXPERTS, TOP_K

HIDDEN = 2048  # DeepEP takes no less
INNER = 16
MAX_TOKENS = 64
MEGAKERNEL: Any = "flashinfer_moe_ep_cutedsl"


def parallel_of(
    rank: int, num_ranks: int, backend: str, tensor_size: int = 1, **changes: Any
) -> FusedMoEParallelConfig:
    """vLLM's record of one rank's place: data parallel, or tensor parallel without a backend."""
    data_size = num_ranks // tensor_size if backend else 1
    values: dict[str, Any] = {
        "tp_size": 1,
        "pcp_size": 1,
        "dp_size": data_size,
        "ep_size": num_ranks,
        "tp_rank": 0,
        "pcp_rank": 0,
        "dp_rank": rank // tensor_size if backend else 0,
        "ep_rank": rank,
        "sp_size": tensor_size,
        "use_ep": True,
        "all2all_backend": backend or "allgather_reducescatter",
        "enable_eplb": False,
    }
    return FusedMoEParallelConfig(**{**values, **changes})


def engine_config(rank: int, num_ranks: int, backend: str, names: list[str]) -> VllmConfig:
    """vLLM's configuration of one rank whose model has the MoE layers ``names``."""
    data = {"data_parallel_size": num_ranks, "data_parallel_rank": rank} if backend else {}
    by_kernel = backend == "passthrough"  # which vLLM chooses for its megakernels
    config = VllmConfig(
        parallel_config=ParallelConfig(
            enable_expert_parallel=True,
            distributed_executor_backend="external_launcher",
            **({"all2all_backend": backend} if backend and not by_kernel else {}),
        ),
        kernel_config=KernelConfig(moe_backend=MEGAKERNEL if by_kernel else "auto"),
    )
    assert not backend or config.parallel_config.all2all_backend == backend
    for name, value in data.items():
        setattr(config.parallel_config, name, value)
    config.compilation_config.static_all_moe_layers.extend(names)
    return config


def build_layer(
    config: VllmConfig,
    parallel: FusedMoEParallelConfig,
    name: str,
    quant_config: Any = None,
    kind: type[RoutedExperts] = RoutedExperts,
    **changes: Any,
) -> Any:
    """A layer as vLLM builds it, weights not loaded; ``changes`` to its configuration."""
    manager = ExpertMapManager(
        max_num_batched_tokens=MAX_TOKENS,
        top_k=TOP_K,
        global_num_experts=NUM_EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    values: dict[str, Any] = {
        "num_experts": NUM_EXPERTS,
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": manager.local_num_experts,
        "num_logical_experts": NUM_EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16,
        "max_num_tokens": MAX_TOKENS,
    }
    moe = FusedMoEConfig(**{**values, **changes})
    with set_current_vllm_config(config):
        return kind(name, torch.bfloat16, moe, quant_config, expert_map_manager=manager)


def load(layer: Any, config: VllmConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Fill parameters from ``tensors`` (E, ...) by name, then do what vLLM's loader does."""
    first = layer.moe_config.ep_rank * layer.local_num_experts
    for name, tensor in tensors.items():
        getattr(layer, name).data.copy_(tensor[first : first + layer.local_num_experts])
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
