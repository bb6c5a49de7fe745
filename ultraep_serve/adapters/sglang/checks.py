"""Which SGLang, and which of its MoE layers, this adapter was verified against; else it refuses."""

import inspect
import pkgutil
from importlib import metadata

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.utils import is_cpu, is_cuda

from ultraep_serve.adapters.verified import SGLANG_VERSIONS
from ultraep_serve.errors import UnsupportedError

__all__ = [
    "check_cpu_balancing",
    "check_cpu_execution",
    "check_device_execution",
    "check_engine",
    "check_layer",
]

_REMEDY = "or serve without balancing: --on-unsupported=off"

# On a GPU: layers, dispatch, quantisation and kernels that take physical experts as they come.
_LAYERS = ("FusedMoE", "DeepEPMoE")
_DISPATCHERS = ("StandardDispatcher", "DeepEPDispatcher")
_QUANTISATIONS = ("UnquantizedFusedMoEMethod", "Fp8MoEMethod")
_RUNNERS = ("triton", "deep_gemm", "flashinfer_cutlass")


def check_engine(parameters: dict[str, list[str]]) -> None:
    """Raise UnsupportedError unless this SGLang's seams are known to be what we take them for.

    ``parameters`` names, by dotted path of a hook's target, the parameters it must have.
    """
    version = metadata.version("sglang")
    if version not in SGLANG_VERSIONS:
        raise UnsupportedError(
            f"SGLang {version} has not been verified; install {' or '.join(SGLANG_VERSIONS)}, "
            "or serve without balancing: --on-unsupported=off"
        )
    for target, expected in parameters.items():
        found = list(inspect.signature(pkgutil.resolve_name(target)).parameters)
        if found != expected:
            raise UnsupportedError(
                f"{target} takes {found}, not {expected}; this SGLang is not the one this adapter "
                "was verified with: --on-unsupported=off"
            )
    if not is_cpu() and not is_cuda():
        raise UnsupportedError(
            "balancing is there only on NVIDIA GPUs and for --device cpu; serve without it: "
            "--on-unsupported=off"
        )


def check_layer(layer: FusedMoE) -> None:
    """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced anywhere."""
    if layer.num_fused_shared_experts:
        raise UnsupportedError(
            f"{layer.layer_name}: shared experts are fused with the routed ones; "
            f"add --disable-shared-experts-fusion, {_REMEDY}"
        )
    if layer.num_experts % layer.moe_ep_size:
        raise UnsupportedError(
            f"{layer.layer_name}: {layer.num_experts} experts do not divide evenly over "
            f"{layer.moe_ep_size} ranks; choose an --ep-size that divides them, {_REMEDY}"
        )


def check_cpu_balancing(layer: FusedMoE) -> None:
    """Raise UnsupportedError if ``layer`` cannot be balanced on CPU."""
    dispatcher = type(layer.dispatcher).__name__
    if (type(layer).__name__, dispatcher) != (_LAYERS[0], _DISPATCHERS[0]):
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer).__name__} with {dispatcher} "
            f"has not been verified; use --moe-a2a-backend none, {_REMEDY}"
        )
    check_cpu_execution(layer)


def check_cpu_execution(layer: FusedMoE) -> None:
    """Raise UnsupportedError if expert parallelism on CPU cannot run ``layer``, balanced or not."""
    if type(layer.quant_method) is not UnquantizedFusedMoEMethod or getattr(
        layer, "use_intel_amx_backend", False
    ):
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer.quant_method).__name__} on this CPU has not been "
            "verified with expert parallelism; use an unquantised model without AMX kernels"
        )
    runs = layer.moe_runner_config
    plain = runs.activation == "silu" and runs.is_gated and runs.gemm1_alpha is None
    if not plain or layer.with_bias or runs.apply_router_weight_on_input:
        raise UnsupportedError(
            f"{layer.layer_name}: experts other than silu(gate) * up without biases "
            f"(activation {runs.activation!r}) are not there yet on CPU"
        )


def check_device_execution(layer: FusedMoE) -> None:
    """Raise UnsupportedError if SGLang's kernels on a GPU cannot run ``layer`` with slots."""
    for problem in (_wrong_dispatch(layer), _wrong_quantisation(layer), _wrong_runner(layer)):
        if problem:
            raise UnsupportedError(f"{layer.layer_name}: {problem}, {_REMEDY}")


def _wrong_dispatch(layer: FusedMoE) -> str | None:
    # With DeepEP SGLang wraps one dispatcher for each batch that it overlaps.
    inner = getattr(layer.dispatcher, "_inners", [layer.dispatcher])
    names = {type(dispatcher).__name__ for dispatcher in inner}
    if type(layer).__name__ not in _LAYERS or not names <= set(_DISPATCHERS):
        return (
            f"{type(layer).__name__} with {', '.join(sorted(names))} has not been verified; "
            "use --moe-a2a-backend none or deepep"
        )
    if not getattr(layer, "deprecate_flag", True):  # of DeepEPMoE: its own way around the runner
        return (
            "DeepEP has no runner for these experts; use --moe-runner-backend deep_gemm, "
            "or --moe-a2a-backend none"
        )
    return None


def _wrong_quantisation(layer: FusedMoE) -> str | None:
    method = layer.quant_method
    if type(method).__name__ not in _QUANTISATIONS:
        return (
            f"quantisation {type(method).__name__} has not been verified; "
            "use an unquantised or a block-quantised FP8 checkpoint"
        )
    if getattr(method, "use_mxfp8", False) or getattr(method, "is_fp4_expert", False):
        return "MXFP8 and FP4 experts have not been verified; use a block-quantised FP8 checkpoint"
    scales = [getattr(layer, f"{name}_input_scale", None) for name in ("w13", "w2")]
    if any(scale is not None for scale in scales):
        return (
            "static activation scales are taken from each rank's own experts, so a copy elsewhere "
            "would compute with others; use a checkpoint with dynamic activation scales"
        )
    return None


def _wrong_runner(layer: FusedMoE) -> str | None:
    found = None if layer.quant_method.runner is None else layer.runner_backend.value
    if found not in _RUNNERS:
        return (
            f"MoE runner {found} has not been verified, or routes inside its kernel; "
            f"use --moe-runner-backend {', '.join(_RUNNERS[:-1])} or {_RUNNERS[-1]}"
        )
    return None
