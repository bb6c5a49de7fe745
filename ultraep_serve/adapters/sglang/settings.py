"""Which of SGLang's settings go with balancing; the others are refused, with what to do."""

from typing import Any, TypeAlias

from sglang.srt.environ import envs
from sglang.srt.utils import is_cpu

from ultraep_serve.errors import UnsupportedError

__all__ = ["check_settings"]

_REMEDY = "or serve without balancing: --on-unsupported=off"

Setting: TypeAlias = tuple[str, object, str]  # name, its legal value or values, what to do
_ANYWHERE: tuple[Setting, ...] = (
    ("enable_eplb", False, "--enable-eplb moves the same weights; drop it"),
    ("enable_waterfill", False, "--enable-waterfill moves tokens itself; drop it"),
    ("ep_num_redundant_experts", 0, "--ep-num-redundant-experts are EPLB's copies; drop it"),
    ("init_expert_location", "trivial", "--init-expert-location must be trivial"),
    ("enable_lora", (None, False), "LoRA on experts is not there yet; drop --enable-lora"),
    ("speculative_algorithm", None, "draft models are not there yet; drop --speculative-algorithm"),
    (
        "enable_two_batch_overlap",
        False,
        "with --enable-two-batch-overlap one batch's weights would be written where the other's "
        "are still read; drop it",
    ),
    ("enable_torch_compile", False, "--enable-torch-compile is not there yet; drop it"),
    ("startup_weight_load_mode", "serial", "--startup-weight-load-mode must be serial"),
    ("pp_size", 1, "pipeline parallelism is not there yet; use --pp-size 1"),
)
_ON_CPU: tuple[Setting, ...] = (
    ("moe_a2a_backend", "none", "on CPU --moe-a2a-backend must be none"),
    ("dp_size", 1, "data parallelism is not there yet on CPU; use --tp-size"),
    ("attn_dp_size", 1, "attention data parallelism is not there yet on CPU; use --tp-size"),
)
_ON_GPU: tuple[Setting, ...] = (
    ("moe_a2a_backend", ("none", "deepep"), "use --moe-a2a-backend none or deepep"),
    (
        "dp_size",
        1,
        "with --dp-size every replica balances apart; use --attn-dp-size for one group, or a "
        "server for each",
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


def check_settings(settings: Any) -> None:
    """Raise UnsupportedError for SGLang's settings (all resolved) that contradict balancing."""
    if settings.ep_dispatch_algorithm == "lp":
        raise UnsupportedError(
            f"--ep-dispatch-algorithm lp (LPLB) splits the same tokens; drop it, {_REMEDY}"
        )
    for name, legal, advice in (*_ANYWHERE, *(_ON_CPU if is_cpu() else _ON_GPU)):
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
    if not is_cpu() and (problem := _wrong_phases(settings)):
        raise UnsupportedError(f"{problem}, {_REMEDY}")


def _wrong_phases(settings: Any) -> str | None:
    """What of CUDA graphs and of scheduling would keep the host from knowing a batch's phase."""
    graphs = settings.cuda_graph_config
    if graphs is not None and graphs.prefill.backend != "disabled":
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
