"""Benchmarks of a balanced server on this machine, two expert-parallel ranks.

    python benchmarks/serving.py ttft      time to first token: off, quota, ideal, and without
                                           expert parallelism; skewed routing
    python benchmarks/serving.py balanced  the same for a model that needs no balancing: the cost
    python benchmarks/serving.py tokens    greedy tokens, off against quota, both parallel modes
    python benchmarks/serving.py quantised the same for quantised experts; vLLM, a CPU with AMX
    python benchmarks/serving.py logprobs  bfloat16: quota against off, and a control pair
    python benchmarks/serving.py perplexity  100,000 tokens of made-up text: off, quota, off again
    python benchmarks/serving.py mixed     time between tokens while prompts of others arrive
    python benchmarks/serving.py start     time until a server is ready, and memory of its ranks
    python benchmarks/serving.py allocator  memory and TTFT with tcmalloc and with glibc's malloc
    python benchmarks/serving.py layers    predicted against measured time of a layer
    python benchmarks/serving.py decode    a step of decode: off, quota, without expert parallelism
    python benchmarks/serving.py profile   where the time of a layer goes, by policy and rank
    python benchmarks/serving.py memory    resident memory by number of slots
    python benchmarks/serving.py soak      mixed traffic for an hour, a policy switch every second
    python benchmarks/serving.py restarts  50 times a server that starts, answers and ends

The engine is the one of the environment, vLLM or SGLang. Each writes
benchmarks/results/serving-NAME.json (SGLang: sglang-NAME.json) with the command and the machine.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from rich.console import Console
from served import MODELS, model, serve, serve_without_ep
from serving_answers import logprobs, perplexity, quantised, tokens
from serving_decode import decode
from serving_endurance import restarts, soak
from serving_layers import layers, profile
from serving_memory import allocator, memory, start
from serving_mixed import mixed

from ultraep_lab.bench.prefill import PrefillOptions
from ultraep_lab.bench.prefill_report import prefill_view
from ultraep_lab.demo.balanced_server import installed_engine, measure_server
from ultraep_serve.types import Policy


def main() -> None:
    """Run one benchmark and write its JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3")
    parser.add_argument("--mode", choices=("tensor", "data"), default="tensor")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--prompt-tokens", type=lengths, default="2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=3600, help="of soak")
    parser.add_argument("--policies", type=policies, default="quota,off", help="of soak")
    parser.add_argument("--every", type=int, default=300, help="seconds between its footprints")
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--aiperf", default="aiperf", help="AIPerf's executable, of mixed")
    options = parser.parse_args()
    options.engine = installed_engine()
    document = {"engine": options.engine, **BENCHMARKS[options.benchmark](options)}
    name = f"{'serving' if options.engine == 'vllm' else 'sglang'}-{options.benchmark}.json"
    harness.write(options.json or Path("benchmarks/results") / name, document)


def lengths(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(map(int, text.split(",")))


def policies(text: str) -> tuple[Policy, ...]:
    """Names separated by commas."""
    return tuple(map(Policy, text.split(",")))


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    """Time to first token under every policy, and without expert parallelism."""
    return measure(options, options.model, (Policy.OFF, Policy.QUOTA, Policy.IDEAL))


def balanced(options: argparse.Namespace) -> dict[str, Any]:
    """What balancing costs where there is nothing to balance."""
    return measure(options, "balanced", (Policy.OFF, Policy.QUOTA))


def measure(options: argparse.Namespace, name: str, policies: tuple[Policy, ...]) -> dict[str, Any]:
    """``bench prefill`` against a server of our own, with the engine alone beside it."""
    prefill = PrefillOptions(
        prompt_tokens=options.prompt_tokens, policies=policies, repeats=options.repeats
    )
    with (
        serve_without_ep(options, model(name), "bfloat16") as plain,
        serve(options, model(name), "bfloat16", "--allow-ideal") as running,
    ):
        document = measure_server(running, plain, prefill, "", name)
    Console().print(prefill_view(document))
    return document


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        ttft, balanced, decode, tokens, quantised, logprobs, perplexity, mixed, start, allocator,
        layers, profile, memory, soak, restarts,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
