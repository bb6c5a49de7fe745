"""What this adapter was verified against, and what it refuses."""

import inspect
import pkgutil
from importlib import metadata
from typing import Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.utils import is_cpu

from ultraep_serve.adapters.verified import SGLANG_VERSIONS
from ultraep_serve.errors import UnsupportedError

__all__ = ["check_cpu_execution", "check_engine", "check_layer", "check_settings"]

_REMEDY = "or serve without balancing: --on-unsupported=off"
_CONFLICTS: tuple[tuple[str, object, str], ...] = (  # setting, its legal value, what to do
    ("enable_eplb", False, "--enable-eplb moves the same weights; drop it"),
    ("enable_waterfill", False, "--enable-waterfill moves tokens itself; drop it"),
    ("ep_num_redundant_experts", 0, "--ep-num-redundant-experts are EPLB's copies; drop it"),
    ("init_expert_location", "trivial", "--init-expert-location must be trivial"),
    ("enable_lora", (None, False), "LoRA on experts is not there yet; drop --enable-lora"),
    ("speculative_algorithm", None, "draft models are not there yet; drop --speculative-algorithm"),
    ("enable_two_batch_overlap", False, "--enable-two-batch-overlap is not there yet; drop it"),
    ("enable_torch_compile", False, "--enable-torch-compile is not there yet; drop it"),
    ("startup_weight_load_mode", "serial", "--startup-weight-load-mode must be serial"),
    ("moe_a2a_backend", "none", "on CPU --moe-a2a-backend must be none"),
    ("dp_size", 1, "data parallelism is not there yet on CPU; use --tp-size"),
    ("attn_dp_size", 1, "attention data parallelism is not there yet on CPU; use --tp-size"),
    ("pp_size", 1, "pipeline parallelism is not there yet; use --pp-size 1"),
)


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
    if not is_cpu():
        raise UnsupportedError(
            "balancing is there only for --device cpu yet; serve without it: --on-unsupported=off"
        )


def check_settings(settings: Any) -> None:
    """Raise UnsupportedError for SGLang's settings (all resolved) that contradict balancing."""
    if settings.ep_dispatch_algorithm == "lp":
        raise UnsupportedError(
            f"--ep-dispatch-algorithm lp (LPLB) splits the same tokens; drop it, {_REMEDY}"
        )
    for name, legal, advice in _CONFLICTS:
        value = getattr(settings, name)
        if value not in (legal if isinstance(legal, tuple) else (legal,)):
            raise UnsupportedError(f"{advice}, {_REMEDY}")
    if settings.ep_size < 2:
        raise UnsupportedError(
            "there is nothing to balance on one rank; add --tp-size 2 --ep-size 2 (or more), "
            f"{_REMEDY}"
        )
    if settings.ep_size != settings.tp_size:
        raise UnsupportedError(
            f"--ep-size {settings.ep_size} differs from --tp-size {settings.tp_size}; "
            f"choose the same for both, {_REMEDY}"
        )


def check_layer(layer: FusedMoE) -> None:
    """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced."""
    if type(layer) is not FusedMoE or type(layer.dispatcher) is not StandardDispatcher:
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer).__name__} with {type(layer.dispatcher).__name__} "
            f"has not been verified; use --moe-a2a-backend none, {_REMEDY}"
        )
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
