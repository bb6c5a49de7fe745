"""Which layers that vLLM has loaded can be balanced, and what a refusal says of the others."""

from typing import Any

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.engines.vllm.expert_tensors import other_kernel
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.launcher.engine import Requirement, unmet

NATIVE = "deep_gemm_mega_moe"  # --moe-backend of vLLM's native megakernel

# On CPU: FP8, INT8, INT4 and MXFP4. They take bfloat16, and vLLM chooses them where there is AMX.
_CPU_QUANTISED = tuple(f"CPUExperts{kind}" for kind in ("Fp8", "Fp8W8A8", "Int8", "Int4", "Mxfp4"))
_CPU_REMEDY = (
    "use an unquantised checkpoint, or one that vLLM computes with "
    f"{', '.join(_CPU_QUANTISED)} (with AMX)"
)

# Of a layer, wherever it is computed.
_PLACEMENT: Requirement = (
    "expert_placement_strategy",
    "linear",
    "expert placement {value!r}; use --expert-placement-strategy linear",
)

# On a GPU: dispatch and expert kernels that take physical experts as they come.
_ALL2ALL_BACKENDS = (
    *("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2"),
    "flashinfer_nvlink_one_sided",
)
_REFUSED_DISPATCH = {
    "flashinfer_nvlink_two_sided": "vLLM's own answers with it have been reported wrong",
    "nixl_ep": "its buffer is made once in a process, for the model's experts without slots",
    "moonep": "it copies experts itself",
}
_MOST_EXPERTS = 2048  # of DeepEP v2, the native megakernel and TRT-LLM's kernels, with slots
_MOST_ON_A_RANK = {"deepep_v2": 256, NATIVE: 512}
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
    "FlashInferMoeEpExperts",
    "TrtLlmBf16ExpertsModular",
    "TrtLlmFp8ExpertsModular",
    "TrtLlmMxfp4ExpertsModular",
    "TrtLlmNvFp4ExpertsModular",
)

_LAYER_ON_GPU: tuple[Requirement, ...] = (
    (
        "expert_map_manager.num_fused_shared_experts",
        0,
        "shared experts fused into the routed ones cannot be moved; do not fuse them",
    ),
)
_MEGA_MOE_FORMAT: Requirement = (
    "weight_format.name",
    "mxfp4",
    "the megakernel has not been verified with experts in {value}; use --moe-backend marlin",
)


def check_layer(layer: RoutedExperts) -> None:
    """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced."""
    num_ranks = layer.moe_config.moe_parallel_config.ep_size
    problem = _wrong_class(layer)
    if problem is None and layer.global_num_experts % num_ranks:
        problem = (
            f"{layer.global_num_experts} experts do not divide evenly over {num_ranks} ranks; "
            "choose a parallel size that divides them"
        )
    if problem is not None:
        raise UnsupportedError(f"{layer.layer_name}: {problem}")


def _wrong_class(layer: RoutedExperts) -> str | None:
    """What may keep ``layer`` from its kernel, and so from the stage that balances it."""
    if type(layer).forward_modular is RoutedExperts.forward_modular:
        return None
    name = type(layer).__name__
    return f"{name} computes its experts in a way of its own, which is not there yet"


def check_cpu_execution(layer: RoutedExperts) -> None:
    """Raise UnsupportedError if expert parallelism on CPU cannot run ``layer``, balanced or not."""
    if problem := (
        unmet(layer, [_PLACEMENT])
        or _wrong_class(layer)
        or _wrong_cpu_kernel(layer)
        or _wrong_ranks(layer)
    ):
        raise UnsupportedError(f"{layer.layer_name}: {problem}", otherwise="")


def _wrong_cpu_kernel(layer: RoutedExperts) -> str | None:
    method = layer.quant_method
    if method.is_monolithic or method.moe_kernel is None:
        kernel = _routing_kernel(layer)
        return f"{kernel} routes inside its kernel and cannot be balanced; {_CPU_REMEDY}"
    experts = method.moe_kernel.fused_experts
    is_quantised = type(experts).__name__ in _CPU_QUANTISED
    is_plain = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
    if not (is_quantised or is_plain):
        return f"expert kernel {type(experts).__name__} has not been verified; {_CPU_REMEDY}"
    if layer.apply_router_weight_on_input and is_quantised:
        return (
            f"{type(experts).__name__} takes no router weights on its input, as this model has "
            "them; use an unquantised checkpoint"
        )
    return None


def _wrong_ranks(layer: RoutedExperts) -> str | None:
    """What of the ranks' arrangement our dispatch on CPU does not have."""
    parallel = layer.moe_config.moe_parallel_config
    if parallel.tp_size > 1 and parallel.dp_size > 1:
        return "tensor and data parallelism together are not there yet on CPU; use one of them"
    if parallel.pcp_size > 1:
        return "prefill context parallelism is not there yet on CPU; use 1"
    return None


def check_device_execution(layer: RoutedExperts, slots: int) -> None:
    """Raise UnsupportedError if vLLM's kernels on a GPU cannot run ``layer`` with ``slots``."""
    if problem := (
        unmet(layer, [_PLACEMENT])
        or _wrong_dispatch(layer)
        or _wrong_kernel(layer)
        or _too_many_experts(layer, slots)
        or unmet(layer, _LAYER_ON_GPU)
    ):
        raise UnsupportedError(f"{layer.layer_name}: {problem}")


def check_mega_moe(layer: Any) -> None:
    """Raise UnsupportedError if vLLM's native megakernel cannot run ``layer`` with slots."""
    if problem := unmet(layer, [_MEGA_MOE_FORMAT]):
        raise UnsupportedError(f"{layer.prefix}: {problem}")


def _wrong_dispatch(layer: RoutedExperts) -> str | None:
    parallel = layer.moe_config.moe_parallel_config
    dispatches = parallel.use_all2all_kernels and not parallel.use_passthrough_all2all
    backend = parallel.all2all_backend
    if dispatches and backend not in _ALL2ALL_BACKENDS:
        reason = _REFUSED_DISPATCH.get(backend, "it has not been verified")
        return (
            f"no dispatch through {backend}: {reason}; "
            f"use --all2all-backend {' or '.join(_ALL2ALL_BACKENDS)}"
        )
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
    return None


def _too_many_experts(layer: RoutedExperts, slots: int) -> str | None:
    """What takes fewer experts than there are with ``slots``, however many the model has."""
    parallel = layer.moe_config.moe_parallel_config
    kernel = type(layer.quant_method.moe_kernel.fused_experts).__name__
    if parallel.use_deepep_v2_kernels:
        kernel = "deepep_v2"
    elif not kernel.startswith("TrtLlm"):
        return None
    return too_many(kernel, parallel.ep_size, layer.local_num_experts, slots)


def too_many(what: str, num_ranks: int, masters: int, slots: int) -> str | None:
    on_a_rank = masters + slots
    total = num_ranks * on_a_rank
    if total <= _MOST_EXPERTS and on_a_rank <= _MOST_ON_A_RANK.get(what, on_a_rank):
        return None
    return (
        f"{what} does not take {total} experts, {on_a_rank} on a rank, {slots} of them in slots; "
        "use fewer --slots or more ranks"
    )


def _routing_kernel(layer: RoutedExperts) -> str:
    """What computes ``layer`` where no kernel takes ids that were chosen before."""
    kernel = layer.quant_method.moe_kernel
    return type(layer.quant_method if kernel is None else kernel.fused_experts).__name__
