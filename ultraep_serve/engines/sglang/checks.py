"""Which SGLang, settings and MoE layers this adapter was verified with; it refuses all others."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import (
    get_moe_a2a_backend,
    should_use_flashinfer_cutlass_moe_fp4_allgather,
)
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.utils import is_cpu, is_cuda

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.sglang.host import ACTIVATIONS
from ultraep_serve.engines.sglang.quantised import wrong_kernel, wrong_megakernel
from ultraep_serve.errors import POLICY_OFF, UnsupportedError
from ultraep_serve.launcher.engine import NO_MEASURED_SPEEDS, Requirement, unmet
from ultraep_serve.launcher.sglang import ANYWHERE, ON_CPU, wrong_sizes
from ultraep_serve.system.versions import SGLANG, NewerEngine

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_ON_THE_WAY = ("forward", "forward_impl", "run_moe_core")  # from the model to its experts
_DISPATCHERS = ("StandardDispatcher", "DeepEPDispatcher")  # take physical experts as they come


def check_engine(newer: NewerEngine = "refuse") -> str:
    """Raise UnsupportedError unless this SGLang can be balanced; what to tell users, or nothing."""
    note = SGLANG.require(metadata.version("sglang"), newer)
    if not is_cpu() and not is_cuda():
        raise UnsupportedError(
            "balancing is there only on NVIDIA GPUs and for --device cpu; use one of them"
        )
    return note


def check_checkpoint(model_config: Any) -> None:
    """Raise UnsupportedError, before loading, for experts that no verified kernel on CPU takes."""
    if model_config.quantization is not None:
        of_checkpoint = getattr(model_config.hf_config, "quantization_config", None)
        remedy = "use an unquantised checkpoint" if of_checkpoint else "drop --quantization"
        raise UnsupportedError(
            f"{model_config.model_path} is quantised ({model_config.quantization}), which on a CPU "
            f"(this one has {torch.backends.cpu.get_cpu_capability()}) has not been verified with "
            f"expert parallelism; {remedy}",
            otherwise="",
        )


def check_layer(layer: FusedMoE) -> None:
    """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced anywhere."""
    problem = _wrong_way(layer)
    if problem is None and layer.num_fused_shared_experts:
        problem = (
            "shared experts are fused with the routed ones; add --disable-shared-experts-fusion"
        )
    if problem is None and layer.num_experts % layer.moe_ep_size:
        problem = (
            f"{layer.num_experts} experts do not divide evenly over {layer.moe_ep_size} ranks; "
            "choose an --ep-size that divides them"
        )
    if problem is not None:
        raise UnsupportedError(f"{layer.layer_name}: {problem}")


def _wrong_way(layer: FusedMoE) -> str | None:
    """What keeps calls of ``layer`` from passing ``FusedMoE.forward_impl``, where the hook is."""
    own = type(layer)
    known = DeepEPMoE if isinstance(layer, DeepEPMoE) else FusedMoE
    for name in _ON_THE_WAY:
        if getattr(own, name) is not getattr(known, name):
            return f"{own.__name__} has a {name} of its own, which this adapter does not know"
    return None


def check_cpu_balancing(layer: FusedMoE) -> None:
    """Raise UnsupportedError if ``layer`` cannot be balanced on CPU."""
    dispatcher = type(layer.dispatcher).__name__
    if dispatcher != _DISPATCHERS[0]:
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer).__name__} with {dispatcher} "
            "has not been verified; use --moe-a2a-backend none"
        )
    check_cpu_execution(layer)


def check_cpu_execution(layer: FusedMoE) -> None:
    """Raise UnsupportedError if expert parallelism on CPU cannot run ``layer``, balanced or not."""
    if type(layer.quant_method) is not UnquantizedFusedMoEMethod or getattr(
        layer, "use_intel_amx_backend", False
    ):
        raise UnsupportedError(
            f"{layer.layer_name}: {type(layer.quant_method).__name__} on this CPU has not been "
            "verified with expert parallelism; use an unquantised model without AMX kernels",
            otherwise="",
        )
    runs = layer.moe_runner_config
    if runs.apply_router_weight_on_input:
        missing = "router weights on the input"
    elif not runs.is_gated or runs.activation not in ACTIVATIONS:
        missing = f"{'gated' if runs.is_gated else 'ungated'} activation {runs.activation!r}"
    else:
        return
    raise UnsupportedError(
        f"{layer.layer_name}: SGLang's own experts on a CPU without AMX have no {missing}; "
        "serve this model on another device",
        otherwise="",
    )


def check_device_execution(layer: FusedMoE) -> None:
    """Raise UnsupportedError if SGLang's kernels on a GPU cannot run ``layer`` with slots."""
    if get_moe_a2a_backend().is_megamoe():
        problem = wrong_megakernel(layer)
    else:
        problem = _wrong_dispatch(layer) or wrong_kernel(layer)
    if problem is not None:
        raise UnsupportedError(f"{layer.layer_name}: {problem}")


def check_draft_layer(layer: FusedMoE) -> None:
    """Raise UnsupportedError if ``layer``, of a draft model, disturbs those that are balanced.

    DeepEP's buffer is one for both models, and laid out for a number of experts at every use.
    """
    if type(layer.dispatcher).__name__ != _DISPATCHERS[0]:
        raise UnsupportedError(
            f"{layer.layer_name}: a draft model's experts and those of a balanced model cannot "
            "share DeepEP's buffer; use --speculative-moe-a2a-backend none",
            otherwise=POLICY_OFF,
        )


def _wrong_dispatch(layer: FusedMoE) -> str | None:
    # With DeepEP SGLang wraps one dispatcher for each batch that it overlaps.
    inner = getattr(layer.dispatcher, "_inners", [layer.dispatcher])
    names = {type(dispatcher).__name__ for dispatcher in inner}
    if not names <= set(_DISPATCHERS):
        return (
            f"{type(layer).__name__} with {', '.join(sorted(names))} has not been verified; "
            "use --moe-a2a-backend none or deepep"
        )
    if should_use_flashinfer_cutlass_moe_fp4_allgather():
        return (
            "its dispatch gathers the tokens of NVFP4 experts itself, after they were routed; "
            "add --disable-flashinfer-cutlass-moe-fp4-allgather"
        )
    if not getattr(layer, "deprecate_flag", True):  # of DeepEPMoE: its own way around the runner
        return (
            "DeepEP has no runner for these experts; use --moe-runner-backend deep_gemm, "
            "or --moe-a2a-backend none"
        )
    return None


_ON_GPU: tuple[Requirement, ...] = (
    (
        "moe_a2a_backend",
        ("none", "deepep", "megamoe"),
        "no dispatch through {value}, which has not been verified; "
        "use --moe-a2a-backend none or deepep",
    ),
    ("attn_cp_size", 1, "context parallelism is not there yet; use --attn-cp-size 1"),
    ("moe_dp_size", 1, "--moe-dp-size is not there yet; use 1"),
    ("dwdp_size", 1, "--dwdp-size moves the same weights; use 1"),
    ("enable_single_batch_overlap", False, "drop --enable-single-batch-overlap: not there yet"),
    ("enable_pdmux", False, "--enable-pdmux is not there yet; drop it"),
    ("enable_layernorm_sp", False, "--enable-layernorm-sp is not there yet; drop it"),
    ("enable_nvidia_megakernel", False, "--enable-nvidia-megakernel has its own experts; drop it"),
    ("elastic_ep_backend", None, "the number of ranks must stay; drop --elastic-ep-backend"),
    ("enable_elastic_expert_backup", False, "drop --enable-elastic-expert-backup"),
    ("enable_paged_experts", False, "--enable-paged-experts moves the same weights; drop it"),
    ("kt_weight_path", None, "experts on the host cannot be moved; drop --kt-weight-path"),
    ("cpu_offload_gb", 0, "offloaded weights cannot be moved; drop --cpu-offload-gb"),
    ("offload_group_size", (-1, 0), "offloaded weights cannot be moved; drop --offload-group-size"),
    ("enable_memory_saver", False, "moved weights cannot be released; drop --enable-memory-saver"),
    ("weight_cache_mode", "off", "cached weights cannot be moved; use --weight-cache-mode off"),
    (
        "ep_dispatch_algorithm",
        (None, "static"),
        "--ep-dispatch-algorithm picks experts itself; drop it",
    ),
    (
        "expert_distribution_recorder_mode",
        (None, "stat", "per_pass", "per_token"),
        "this --expert-distribution-recorder-mode counts what is dispatched, copies included; "
        "use stat",
    ),
)


def check_settings(settings: "ServerArgs") -> None:
    """Raise UnsupportedError for SGLang's settings (all resolved) that contradict balancing."""
    if problem := (
        unmet(settings, [*ANYWHERE, *(ON_CPU if is_cpu() else _ON_GPU)])
        or wrong_sizes(settings)
        or (None if is_cpu() else _wrong_phases(settings))
    ):
        raise UnsupportedError(problem)


def check_mega_moe(settings: "ServerArgs", config: BalanceConfig) -> None:
    """Raise UnsupportedError for what keeps batches from a megakernel that balances them.

    Models have larger ones than it takes computed in another way.
    """
    if settings.moe_a2a_backend != "megamoe":
        return
    chunk, most = settings.chunked_prefill_size or 0, most_tokens()
    problem = None
    if config.speeds == "auto":
        problem = NO_MEASURED_SPEEDS
    elif envs.SGLANG_OPT_DEEPGEMM_MEGA_GATE.get():
        problem = "SGLANG_OPT_DEEPGEMM_MEGA_GATE gives ids to the megakernel itself; unset it"
    elif not 0 < chunk <= most:
        problem = (
            f"the megakernel takes {most} tokens of a rank, and prefill may have more; choose a "
            "smaller --chunked-prefill-size, or set "
            "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
        )
    if problem is not None:
        raise UnsupportedError(problem)


def most_tokens() -> int:
    """How many tokens of a rank a megakernel takes at once."""
    return int(envs.SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK.get())


def _wrong_phases(settings: "ServerArgs") -> str | None:
    """What of CUDA graphs and of scheduling would keep the host from knowing a batch's phase."""
    graphs = settings.cuda_graph_config
    # With DeepEP layers run between the parts of a breakable graph (``DeepEPMoE.forward``).
    prefill = ("disabled", "breakable") if settings.moe_a2a_backend == "deepep" else ("disabled",)
    if graphs is not None and graphs.prefill.backend not in prefill:
        return (
            f"prefill in CUDA graphs ({graphs.prefill.backend}) replays what was captured, without "
            "balancing; add --disable-prefill-cuda-graph"
        )
    if graphs is not None and graphs.decode.backend not in ("full", "disabled"):
        return f"--cuda-graph-backend-decode {graphs.decode.backend} is not there yet; use full"
    if settings.attn_dp_size > 1 and envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        return (
            "with SGLANG_SCHEDULER_SKIP_ALL_GATHER ranks do not know each other's batches; unset it"
        )
    return None
