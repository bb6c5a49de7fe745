"""How to start vLLM's OpenAI server; imports nothing of vLLM until it runs.

    python -m ultraep_serve.engines.vllm.launch --model MODEL --headless [engine flags]

runs vLLM's own ranks without a server, for all hosts but the first: what ``vllm serve --headless``
does. That command starts only where a distribution is named vllm, which CPU builds are not, and the
module that starts servers has no headless mode. Verified with 0.32 and 0.33.
"""

import argparse
import math
import os
import sys
from importlib import metadata
from importlib.util import find_spec

from ultraep_serve.costs.kv_cache import kv_bytes_per_token
from ultraep_serve.engines.common.guard import left_out
from ultraep_serve.engines.common.launch import (
    EngineFlags,
    RankCount,
    allocator,
    caches_every_token,
    check_experts,
    context_length,
    local_url,
    package_folder,
)
from ultraep_serve.errors import POLICY_OFF, ConfigError, UnsupportedError
from ultraep_serve.launcher.binding import CoreBinding
from ultraep_serve.launcher.supervisor import EngineCommand
from ultraep_serve.launcher.tuned_kernels import TunedKernels
from ultraep_serve.system.environment import engine_variable
from ultraep_serve.system.gpu_packages import require_fit_packages
from ultraep_serve.system.machine import available_memory
from ultraep_serve.types import Policy

__all__ = [
    "DEFAULT_PORT",
    "count_micro_batches",
    "count_ranks",
    "engine_command",
    "parse_engine_flags",
]

DEFAULT_PORT = 8000
_HEADLESS = "ultraep_serve.engines.vllm.launch"
_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"  # GiB
_GIB = 1 << 30


def parse_engine_flags(flags: list[str]) -> argparse.Namespace:
    """The few of vLLM's own flags that matter for starting: host, port, sizes and hosts."""
    parser = EngineFlags(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--data-parallel-size-local", "-dpl", type=int)
    parser.add_argument("--data-parallel-rank", "-dpn", type=int)
    parser.add_argument("--data-parallel-multi-port-external-lb", action="store_true")
    parser.add_argument("--nnodes", "-n", type=int, default=1)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--enable-expert-parallel", "-ep", action="store_true")
    parser.add_argument("--enable-eplb", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--enable-dbo", action="store_true")
    parser.add_argument("--ubatch-size", type=int, default=0)
    parser.add_argument("--kv-cache-memory-bytes")
    parser.add_argument("--max-model-len")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--config")
    return parser.parse_known_args([_with_dashes(flag) for flag in flags])[0]


def _with_dashes(flag: str) -> str:
    """Spell ``flag`` with dashes: vLLM takes underscores in their place."""
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else flag


def engine_command(model: str, flags: list[str], policy: Policy) -> EngineCommand:
    """Command and environment that serve ``model`` with vLLM's own ``flags``.

    Raises UnsupportedError or ConfigError for what can be seen to be wrong before starting.
    """
    if find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed here; pip install '.[vllm]' in a checkout")
    parsed = parse_engine_flags(flags)
    if parsed.data_parallel_multi_port_external_lb:
        raise UnsupportedError(
            "with --data-parallel-multi-port-external-lb every rank has a server and a port of its "
            "own, which this command does not start; start `vllm serve` itself with the flags "
            """--additional-config '{"ultraep": {"sidecar": {}}}'""",
            otherwise="",
        )
    ranks = count_ranks(parsed)
    if policy is not Policy.OFF:
        if problem := left_out("vllm"):
            raise ConfigError(problem)
        check_experts(model, "vLLM", None if parsed.config else ranks.in_stage)
        if not parsed.config:
            _check_parallelism(ranks.in_stage, parsed.enable_expert_parallel)
        _check_conflicts(parsed)
    binding = None
    if _is_cpu_build() and ranks.here:  # none where this host has the server alone
        binding = CoreBinding.here("VLLM_CPU_OMP_THREADS_BIND", ranks.here)
    environment, said = _environment(model, parsed, binding)
    if policy is not Policy.OFF and not _is_cpu_build():
        said += tuple(require_fit_packages("vllm"))
    return EngineCommand(
        arguments=[
            sys.executable,
            "-m",
            _HEADLESS if parsed.headless else "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            *flags,
        ],
        url=None if parsed.headless else local_url(parsed.host, parsed.port, parsed.ssl_certfile),
        num_ranks=ranks.here,
        environment=environment,
        tuned=None if _is_cpu_build() else _tuned_kernels(parsed),
        binding=binding,
        said=said,
    )


def count_ranks(parsed: argparse.Namespace) -> RankCount:
    """The ranks that ``parsed`` flags ask for, and those this host gets, as vLLM divides them.

    Ranks of a pipeline stage follow each other in each data-parallel replica.
    """
    tensor, stages = int(parsed.tensor_parallel_size), max(1, int(parsed.pipeline_parallel_size))
    size = tensor * stages
    total = size * int(parsed.data_parallel_size)
    if parsed.data_parallel_rank is not None:
        here = size
    elif parsed.data_parallel_size_local is not None:
        here = size * int(parsed.data_parallel_size_local)
    else:
        here = max(1, total // max(1, parsed.nnodes))
    in_stage_here = here // stages if here >= size else min(tensor, here)
    return RankCount(total, here, stages, in_stage_here)


def count_micro_batches(parsed: argparse.Namespace) -> int:
    """How many may overlap, each with slots of its own: vLLM's ``num_ubatches``."""
    return 2 if parsed.enable_dbo else max(1, int(parsed.ubatch_size))


def _check_parallelism(num_ranks: int, expert_parallel: bool) -> None:
    if num_ranks < 2:
        raise UnsupportedError(
            "there is nothing to balance on one rank; add --tensor-parallel-size 2 or "
            "--data-parallel-size 2 (or more)",
            otherwise=POLICY_OFF,
        )
    if not expert_parallel:
        raise UnsupportedError(
            "without --enable-expert-parallel every rank computes a part of every expert and "
            "there is nothing to balance; add the flag",
            otherwise=POLICY_OFF,
        )


def _check_conflicts(parsed: argparse.Namespace) -> None:
    problem = None
    if parsed.enable_eplb:
        problem = "--enable-eplb moves the same weights; drop it"
    elif _is_cpu_build() and parsed.tensor_parallel_size > 1 and parsed.data_parallel_size > 1:
        problem = "tensor and data parallelism together are not there yet on CPU; use one of them"
    if problem is not None:
        raise UnsupportedError(problem, otherwise=POLICY_OFF)


def _environment(
    model: str, parsed: argparse.Namespace, binding: CoreBinding | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Defaults that vLLM needs on a plain CPU machine, and what users are told of them."""
    environment = {"HF_HUB_OFFLINE": "1"} if os.path.isdir(model) else {}
    if binding is None:
        return environment, ()
    environment |= allocator()
    if binding.has_node_per_rank:  # vLLM's own binding and cache do the rest
        return environment, ()
    environment[binding.variable] = binding.setting
    if parsed.kv_cache_memory_bytes or engine_variable(_CACHE_VARIABLE):
        return environment, ()
    size, room = _cache_size(model, parsed, len(binding.ranks))
    environment[_CACHE_VARIABLE] = str(size)
    said = f"KV cache of {size} GiB on each rank, {room}; --kv-cache-memory-bytes sets it"
    return environment, (said,)


def _cache_size(model: str, parsed: argparse.Namespace, num_ranks: int) -> tuple[int, str]:
    """GiB of each rank's KV cache where ranks share a node's memory, and what it has room for.

    vLLM would size it as if the memory were one rank's own. Each rank is taken to cache all heads,
    as with data parallelism. All caches take half of the free memory at most. Raises ConfigError
    where that is too little even if ranks divide the heads: vLLM would refuse it after loading.
    """
    tokens = context_length(model, parsed.max_model_len)
    try:
        of_token = kv_bytes_per_token(model)
    except ConfigError:  # not here, or of another form, which vLLM knows
        tokens = None
    if tokens is None:
        return 1, "as the model's context is not known before it is loaded"
    of_token *= 2 if parsed.dtype in ("float", "float32") else 1
    most = (available_memory() or sys.maxsize) // (2 * num_ranks * _GIB)
    size = max(1, min(most, math.ceil(tokens * of_token / _GIB)))
    room = size * _GIB // of_token
    fits = room * parsed.tensor_parallel_size
    if fits < tokens and caches_every_token(model):
        raise ConfigError(
            f"one request may have {tokens} tokens, and half of the free memory holds the KV cache "
            f"of {fits}; add --max-model-len {fits}, or choose the cache's size with "
            f"--kv-cache-memory-bytes or {_CACHE_VARIABLE}"
        )
    return size, f"room for {room} tokens (one request may have {tokens})"


def _tuned_kernels(parsed: argparse.Namespace) -> TunedKernels:
    folder = package_folder("vllm") / "model_executor" / "layers" / "fused_moe" / "configs"
    return TunedKernels("VLLM_TUNED_CONFIG_FOLDER", folder, count_micro_batches(parsed))


def _is_cpu_build() -> bool:
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Run the ranks of this host until they or the first host's end."""
    from vllm.entrypoints.cli.serve import (  # defined elsewhere, in every version in another place
        ServeSubcommand,
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own commands do
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
