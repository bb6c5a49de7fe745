"""Benchmarks of a balanced server on this machine, two expert-parallel ranks.

    python benchmarks/serving.py ttft      time to first token: off, quota, ideal; skewed routing
    python benchmarks/serving.py balanced  off and quota of a model that needs none: the cost
    python benchmarks/serving.py tokens    greedy tokens, off against quota

The engine is the one of the environment, vLLM or SGLang. Each writes
benchmarks/results/serving-NAME.json (SGLang: sglang-NAME.json) with the command and the machine.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from rich.console import Console
from served import add_server_flags, model, serve

from ultraep_lab.bench.prefill import PrefillOptions
from ultraep_lab.bench.prefill_report import prefill_view
from ultraep_lab.demo.balanced_server import (
    check_tokens,
    installed_engine,
    measure_server,
    mixed_prompts,
)
from ultraep_serve.types import Policy


def main() -> None:
    """Run one benchmark and write its JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    add_server_flags(parser)
    parser.add_argument("--prompt-tokens", type=harness.numbers, default=(2048, 4096, 8192))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=64, help="of tokens")
    options = parser.parse_args()
    engine = installed_engine()
    document = {"engine": engine, **BENCHMARKS[options.benchmark](options)}
    name = f"{'serving' if engine == 'vllm' else 'sglang'}-{options.benchmark}.json"
    harness.write(options.json or Path("benchmarks/results") / name, document)


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    """Time to first token under every policy."""
    return measure(options, options.model, (Policy.OFF, Policy.QUOTA, Policy.IDEAL))


def balanced(options: argparse.Namespace) -> dict[str, Any]:
    """What balancing costs where there is nothing to balance."""
    return measure(options, "balanced", (Policy.OFF, Policy.QUOTA))


def measure(options: argparse.Namespace, name: str, policies: tuple[Policy, ...]) -> dict[str, Any]:
    """``bench prefill`` against a server of our own."""
    prefill = PrefillOptions(
        prompt_tokens=options.prompt_tokens, policies=policies, repeats=options.repeats
    )
    with serve(options, model(name), options.dtype, "--allow-ideal") as running:
        document = measure_server(running, prefill, "", name)
    Console().print(prefill_view(document))
    return {"dtype": options.dtype, **document}


def tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens, off against quota; with vLLM in both parallel modes, compiled and eager."""
    prompts, rows = mixed_prompts(options.prompts), []
    is_vllm = installed_engine() == "vllm"
    modes, eagerness = (("tensor", "data"), (False, True)) if is_vllm else (("tensor",), (False,))
    cases = itertools.product(("float32", "bfloat16"), modes, eagerness)
    for dtype, options.mode, options.eager in cases:
        with serve(options, model(options.model), dtype) as running:
            check = check_tokens(running, prompts, concurrency=1).to_json(dtype)
        rows.append({"mode": options.mode, "eager": options.eager, **check})
        print(rows[-1], flush=True)
    return {"model": options.model, "max_tokens": 16, "rows": rows}


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    function.__name__: function for function in (ttft, balanced, tokens)
}

if __name__ == "__main__":
    main()
