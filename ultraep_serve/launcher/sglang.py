"""How to start SGLang's OpenAI server, and what is refused of it; imports nothing of SGLang."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import POLICY_OFF, ConfigError, UnsupportedError
from ultraep_serve.launcher import engine
from ultraep_serve.launcher.cores import cores_of_ranks
from ultraep_serve.system.environment import child_environment
from ultraep_serve.system.versions import require_fit_packages
from ultraep_serve.types import Policy

DEFAULT_PORT = 30000
MISSING = (
    "SGLang is not installed here; pip install '.[sglang]' in a checkout, or for CPU run "
    "deploy/setup_sglang_cpu.py"
)
_NEEDED_ON_CPU = ("sgl_kernel", "torchvision")  # or what stands in for them
_CPU_CACHE_TOKENS = "32768"  # each rank would otherwise take the machine's memory for its own
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"


def engine_command(
    parsed: argparse.Namespace, flags: list[str], config: BalanceConfig
) -> engine.EngineCommand:
    """Command and environment that serve with SGLang's ``flags``, as ``parsed``, and ``config``.

    Raises UnsupportedError or ConfigError for what can be seen to be wrong before starting.
    """
    on_cpu = _is_for_cpu(parsed)
    _check(parsed, config, on_cpu)
    environment, said = _on_cpu(parsed) if on_cpu else ({}, [])
    if config.policy is not Policy.OFF and not on_cpu:
        said = require_fit_packages("sglang")
    if os.path.isdir(parsed.model):
        environment["HF_HUB_OFFLINE"] = "1"
    more = _cpu_flags(parsed) if on_cpu else _gpu_flags(parsed, config.policy)
    program = [sys.executable, "-m", "sglang.launch_server"]
    return engine.EngineCommand(
        arguments=[*program, *flags, *more],
        environment=child_environment(config.to_json(), environment),
        address=(parsed.host, parsed.port),  # hosts without a server answer there too
        said=said,
    )


def _check(parsed: argparse.Namespace, config: BalanceConfig, on_cpu: bool) -> None:
    if on_cpu and (missing := [name for name in _NEEDED_ON_CPU if find_spec(name) is None]):
        raise ConfigError(
            f"SGLang imports {' and '.join(missing)}, which have no CPU build; set up an "
            "environment with deploy/setup_sglang_cpu.py, which has stand-ins for them"
        )
    engine.check_model(parsed.model)
    if on_cpu and parsed.ep_size > 1:
        engine.check_cpu_experts(parsed.model, parsed.quantization, "a GPU")
    if config.policy is Policy.OFF:
        return
    engine.check_plugin("sglang")
    engine.check_experts(parsed.model, "SGLang", config, count_ranks(parsed).total)
    if problem := wrong_sizes(parsed):
        raise UnsupportedError(problem, otherwise=POLICY_OFF)
    lora = ("lora_paths", None, f"{engine.NO_LORA} and --lora-paths")
    problem = engine.unmet(parsed, [*ANYWHERE, *(ON_CPU if on_cpu else ()), lora])
    if config.on_unsupported == "error":
        if problem:
            raise UnsupportedError(problem, otherwise=POLICY_OFF)
        chunk = parsed.chunked_prefill_size or 0
        if chunk > 0 and not parsed.enable_mixed_chunk:  # which adds tokens of decode
            engine.require_large_batches(config, chunk)  # of all ranks, with --attn-dp-size too


def count_ranks(parsed: argparse.Namespace) -> engine.RankCount:
    """The ranks that ``parsed`` flags ask for, and those this host gets, as SGLang divides them."""
    return engine.rank_count(parsed.tp_size, parsed.nnodes)


def wrong_sizes(settings: Any) -> str | None:
    """Why there is nothing to balance, in flags and in SGLang's settings alike.

    Where dispatch has a backend SGLang takes as many ranks as there are tensor-parallel ones.
    """
    if settings.tp_size < 2:
        return "there is nothing to balance on one rank; add --tp-size 2 --ep-size 2 (or more)"
    if settings.moe_a2a_backend == "none" and settings.ep_size != settings.tp_size:
        return (
            f"with --ep-size {settings.ep_size} below --tp-size {settings.tp_size} ranks share "
            "parts of every expert; choose the same for both"
        )
    return None


# Of SGLang's settings, as flags give them and as it resolves them, wherever it computes.
ANYWHERE: tuple[engine.Requirement, ...] = (
    (
        "ep_dispatch_algorithm",
        lambda name: name != "lp",
        "--ep-dispatch-algorithm lp (LPLB) splits the same tokens; drop it",
    ),
    ("enable_eplb", False, "--enable-eplb moves the same weights; drop it"),
    ("enable_waterfill", False, "--enable-waterfill moves tokens itself; drop it"),
    ("ep_num_redundant_experts", 0, "--ep-num-redundant-experts are EPLB's copies; drop it"),
    ("init_expert_location", "trivial", "--init-expert-location must be trivial"),
    ("enable_lora", (None, False), engine.NO_LORA),
    (
        "enable_two_batch_overlap",
        False,
        "with --enable-two-batch-overlap one batch's weights would be written where the other's "
        "are still read; drop it",
    ),
    (
        "enable_deterministic_inference",
        False,
        "--enable-deterministic-inference asks for the same sums whatever else is in a batch, "
        "which decides where experts are computed; drop it",
    ),
    ("enable_torch_compile", False, "--enable-torch-compile is not there yet; drop it"),
    ("startup_weight_load_mode", "serial", "--startup-weight-load-mode must be serial"),
    (
        "disaggregation_mode",
        lambda mode: mode != "decode",
        "prefill, which is balanced, runs on other servers with --disaggregation-mode decode; "
        "balance those",
    ),
    ("dllm_algorithm", None, "--dllm-algorithm is not there yet; drop it"),
    ("pp_size", 1, "pipeline parallelism is not there yet; use --pp-size 1"),
    (
        "dp_size",
        1,
        "with --dp-size every replica balances apart; use a server for each, or on GPUs "
        "--attn-dp-size for one group",
    ),
)


ON_CPU: tuple[engine.Requirement, ...] = (
    ("moe_a2a_backend", "none", "on CPU --moe-a2a-backend must be none"),
    ("attn_dp_size", 1, "attention data parallelism is not there yet on CPU; use --tp-size"),
)


def _is_for_cpu(parsed: argparse.Namespace) -> bool:
    """Whether to serve on CPU: as the user says, else where there is no GPU's device file."""
    if parsed.device:
        return bool(parsed.device == "cpu")
    return not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd"))


def _cpu_flags(parsed: argparse.Namespace) -> list[str]:
    """What a plain CPU machine needs, where the user did not choose."""
    chosen = []
    if not parsed.device:
        chosen += ["--device", "cpu"]
    if not parsed.attention_backend:
        chosen += ["--attention-backend", "torch_native"]
    if not parsed.max_total_tokens:
        chosen += ["--max-total-tokens", _CPU_CACHE_TOKENS]
    return chosen


def _gpu_flags(parsed: argparse.Namespace, policy: Policy) -> list[str]:
    """What balancing needs on GPUs, where the user did not choose.

    Prefill is planned batch by batch, outside of CUDA graphs, as it runs with DeepEP in any case;
    copies are made of routed experts.
    """
    if policy is Policy.OFF:
        return []
    graphs = parsed.cuda_graph_config or parsed.cuda_graph_backend_prefill
    is_outside = parsed.disable_cuda_graph or parsed.disable_prefill_cuda_graph
    chosen = []
    if not (graphs or is_outside or parsed.moe_a2a_backend == "deepep"):
        chosen.append("--disable-prefill-cuda-graph")
    if not (parsed.disable_shared_experts_fusion or parsed.enforce_shared_experts_fusion):
        chosen.append("--disable-shared-experts-fusion")
    return chosen


def _on_cpu(parsed: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Variables that ranks on CPUs need where the user did not choose, and what is said.

    SGLang binds each rank to a NUMA node, and does not start more ranks than there are.
    """
    environment = {**engine.allocator(), "SGLANG_USE_CPU_ENGINE": "1"}
    said = []
    if cores := cores_of_ranks(count_ranks(parsed).here * parsed.dp_size):
        environment[_CORES] = "|".join(",".join(map(str, cpus)) for cpus in cores)
        environment["OMP_NUM_THREADS"] = str(len(cores[0]))
        said.append(f"ranks compute on the cores {environment[_CORES]}; {_CORES} sets them")
    if not parsed.max_total_tokens:
        said.append(f"KV cache of {_CPU_CACHE_TOKENS} tokens; --max-total-tokens sets it")
    return environment, said
