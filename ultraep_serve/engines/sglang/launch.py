"""How to start SGLang's OpenAI server; imports nothing of SGLang until it runs.

    python -m ultraep_serve.engines.sglang.launch --model-path MODEL [engine flags]

is SGLang's own server, with what it needs to run and to be balanced checked beforehand.
"""

import argparse
import os
import runpy
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.guard import PLUGIN, left_out
from ultraep_serve.engines.common.launch import (
    EngineFlags,
    RankCount,
    allocator,
    check_experts,
    context_length,
    local_url,
    package_folder,
)
from ultraep_serve.engines.common.requirements import Requirement, unmet
from ultraep_serve.errors import POLICY_OFF, ConfigError, UnsupportedError
from ultraep_serve.launcher.binding import CoreBinding
from ultraep_serve.launcher.supervisor import EngineCommand
from ultraep_serve.launcher.tuned_kernels import TunedKernels
from ultraep_serve.system.gpu_packages import require_fit_packages
from ultraep_serve.types import Policy

__all__ = [
    "DEFAULT_PORT",
    "count_micro_batches",
    "count_ranks",
    "engine_command",
    "parse_engine_flags",
]

DEFAULT_PORT = 30000
_THIS_MODULE = "ultraep_serve.engines.sglang.launch"
_NEEDED_ON_CPU = ("sgl_kernel", "torchvision")  # or what stands in for them
_GROUP = "sglang.srt.plugins"
_CPU_CACHE_TOKENS = 32768  # each rank would otherwise take the machine's memory for its own


def parse_engine_flags(flags: list[str]) -> argparse.Namespace:
    """The few of SGLang's own flags that matter for starting; None where the user chose nothing."""
    parser = EngineFlags(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    parser.add_argument("--ep-size", "--expert-parallel-size", "--ep", type=int, default=1)
    parser.add_argument("--dp-size", "--data-parallel-size", "--dp", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--attention-backend")
    parser.add_argument("--max-total-tokens")
    parser.add_argument("--context-length")
    parser.add_argument("--ep-dispatch-algorithm")
    parser.add_argument("--moe-a2a-backend", default="none")
    parser.add_argument("--cuda-graph-config")
    parser.add_argument("--cuda-graph-backend-prefill")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--disable-prefill-cuda-graph", action="store_true")
    parser.add_argument("--disable-shared-experts-fusion", action="store_true")
    parser.add_argument("--enforce-shared-experts-fusion", action="store_true")
    parser.add_argument("--enable-eplb", action="store_true")
    parser.add_argument("--enable-waterfill", action="store_true")
    parser.add_argument("--config")
    return parser.parse_known_args(flags)[0]


def engine_command(model: str, flags: list[str], policy: Policy) -> EngineCommand:
    """Command and environment that serve ``model`` with SGLang's own ``flags``.

    Raises UnsupportedError or ConfigError for what can be seen to be wrong before starting.
    """
    if find_spec("sglang") is None:
        raise ConfigError(
            "SGLang is not installed here; pip install '.[sglang]' in a checkout, or for CPU run "
            "deploy/setup_sglang_cpu.py"
        )
    parsed = parse_engine_flags(flags)
    if policy is not Policy.OFF:
        check_experts(model, "SGLang", None if parsed.config else parsed.tp_size)
        if not parsed.config:
            _check_parallelism(parsed)
        if problem := unmet(parsed, _CONFLICTS):
            raise UnsupportedError(problem, otherwise=POLICY_OFF)
    on_cpu = _is_for_cpu(parsed)
    num_ranks = count_ranks(parsed).here
    cache_tokens = max(_CPU_CACHE_TOKENS, context_length(model, parsed.context_length) or 0)
    binding, said = None, []
    if policy is not Policy.OFF and not on_cpu:
        said += require_fit_packages("sglang")
    if on_cpu:
        if not parsed.max_total_tokens:
            said.append(f"KV cache of {cache_tokens} tokens; --max-total-tokens sets it")
        binding = CoreBinding.here("SGLANG_CPU_OMP_THREADS_BIND", num_ranks * parsed.dp_size)
    return EngineCommand(
        arguments=[
            sys.executable,
            "-m",
            _THIS_MODULE,
            "--model-path",
            model,
            *flags,
            *(_cpu_flags(parsed, cache_tokens) if on_cpu else _gpu_flags(parsed, policy)),
        ],
        # hosts without a server answer there too
        url=local_url(parsed.host, parsed.port, parsed.ssl_certfile),
        num_ranks=num_ranks,
        environment=_environment(model, binding),
        binding=binding,
        said=tuple(said),
        tuned=None if on_cpu else TunedKernels("SGLANG_MOE_CONFIG_DIR", _tuned_folder()),
    )


def _tuned_folder() -> Path:
    """Return the folder of which SGLang takes ``configs/triton_VERSION``."""
    return package_folder("sglang") / "srt" / "layers" / "moe" / "moe_runner" / "triton_utils"


def count_ranks(parsed: argparse.Namespace) -> RankCount:
    """The ranks that ``parsed`` flags ask for, and those this host gets, as SGLang divides them."""
    here = max(1, parsed.tp_size // max(1, parsed.nnodes))
    return RankCount(parsed.tp_size, here, stages=1, in_stage_here=here)


def count_micro_batches(parsed: argparse.Namespace) -> int:
    """How many may overlap: with balancing, one."""
    return 1


def _check_parallelism(parsed: argparse.Namespace) -> None:
    if parsed.tp_size < 2:
        problem = "there is nothing to balance on one rank; add --tp-size 2 --ep-size 2 (or more)"
    elif parsed.moe_a2a_backend == "none" and parsed.ep_size != parsed.tp_size:
        problem = (
            f"with --ep-size {parsed.ep_size} below --tp-size {parsed.tp_size} ranks share parts "
            "of every expert; choose the same for both"
        )
    else:
        return  # with another backend SGLang takes as many ranks as there are tensor-parallel ones
    raise UnsupportedError(problem, otherwise=POLICY_OFF)


# SGLang's own ways of evening out the load; two of them at once would undo each other.
_CONFLICTS: tuple[Requirement, ...] = (
    ("enable_eplb", False, "--enable-eplb moves the same weights; drop it"),
    ("enable_waterfill", False, "--enable-waterfill moves the same tokens; drop it"),
    (
        "ep_dispatch_algorithm",
        lambda name: name != "lp",
        "--ep-dispatch-algorithm lp (LPLB) splits the same tokens; drop it",
    ),
)


def _is_for_cpu(parsed: argparse.Namespace) -> bool:
    """Whether to serve on CPU: as the user says, else where there is no GPU's device file."""
    if parsed.device:
        return bool(parsed.device == "cpu")
    return not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd"))


def _cpu_flags(parsed: argparse.Namespace, cache_tokens: int) -> list[str]:
    """What a plain CPU machine needs, where the user did not choose."""
    chosen = []
    if not parsed.device:
        chosen += ["--device", "cpu"]
    if not parsed.attention_backend:
        chosen += ["--attention-backend", "torch_native"]
    if not parsed.max_total_tokens:
        chosen += ["--max-total-tokens", str(cache_tokens)]
    return chosen


def _gpu_flags(parsed: argparse.Namespace, policy: Policy) -> list[str]:
    """What balancing needs on GPUs, where the user did not choose.

    Prefill is planned batch by batch, outside of CUDA graphs; copies are made of routed experts.
    """
    if policy is Policy.OFF:
        return []
    graphs = parsed.cuda_graph_config or parsed.cuda_graph_backend_prefill
    chosen = []
    if not (graphs or parsed.disable_cuda_graph or parsed.disable_prefill_cuda_graph):
        chosen.append("--disable-prefill-cuda-graph")
    if not (parsed.disable_shared_experts_fusion or parsed.enforce_shared_experts_fusion):
        chosen.append("--disable-shared-experts-fusion")
    return chosen


def _environment(model: str, binding: CoreBinding | None) -> dict[str, str]:
    """Defaults that SGLang needs on a plain CPU machine, and that users need not know."""
    environment = {"HF_HUB_OFFLINE": "1"} if os.path.isdir(model) else {}
    if binding is None:
        return environment
    environment |= allocator()
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    environment[binding.variable] = binding.setting
    environment["OMP_NUM_THREADS"] = str(len(binding.ranks[0].cpus))
    return environment


def main() -> None:
    """Run SGLang's server with this process's arguments."""
    if parse_engine_flags(sys.argv[1:]).device == "cpu":
        _require_cpu_modules()
    if BalanceConfig.from_environment() is not None:
        _require_plugin()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _require_cpu_modules() -> None:
    if missing := [name for name in _NEEDED_ON_CPU if find_spec(name) is None]:
        sys.exit(
            f"ultraep: error: SGLang imports {' and '.join(missing)}, which have no CPU build; "
            "set up an environment with deploy/setup_sglang_cpu.py, which has stand-ins for them"
        )


def _require_plugin() -> None:
    """End the process if SGLang would not load this plugin, which it does not say itself."""
    if not entry_points(group=_GROUP, name=PLUGIN):
        sys.exit(
            f"ultraep: error: this package is installed without its entry point in {_GROUP}; "
            "install it anew: pip install '.[sglang]' in a checkout, on CPU "
            "deploy/setup_sglang_cpu.py"
        )
    if problem := left_out("sglang"):
        sys.exit(f"ultraep: error: {problem}")


if __name__ == "__main__":
    main()
