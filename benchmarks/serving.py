"""Benchmarks of a balanced server on this machine, two expert-parallel ranks.

    python benchmarks/serving.py ttft      time to first token: off, quota, ideal, skewed routing
    python benchmarks/serving.py balanced  the same for a model that needs no balancing: the cost
    python benchmarks/serving.py tokens    greedy tokens, off against quota, both parallel modes
    python benchmarks/serving.py logprobs  bfloat16: quota against off, and a control pair
    python benchmarks/serving.py layers    predicted against measured time of a layer
    python benchmarks/serving.py memory    resident memory by number of slots

The engine is the one of the environment, vLLM or SGLang. Each writes
benchmarks/results/serving-NAME.json (SGLang: sglang-NAME.json) with the command and the machine.
"""

import argparse
import functools
import itertools
import os
import random
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ultraep_serve.bench.prefill import PrefillOptions
from ultraep_serve.bench.report import machine, prefill_document, prefill_view, write_json
from ultraep_serve.bench.server import Server
from ultraep_serve.bench.sidecar import Sidecar
from ultraep_serve.bench.tokens import compare_tokens
from ultraep_serve.cli.bench import measure_with_progress
from ultraep_serve.costs.fit import fit
from ultraep_serve.costs.model import CostModel
from ultraep_serve.launcher.run_directory import run_directory_of_port
from ultraep_serve.observability.reader import RingReader
from ultraep_serve.observability.schema import ring_path
from ultraep_serve.testing import ModelSpec, demo_balanced, demo_glm4, demo_qwen3, make_model
from ultraep_serve.testing.checks import (
    check_tokens,
    generate_under,
    mixed_prompts,
    prompt_logprobs,
)
from ultraep_serve.testing.permute import permute_experts
from ultraep_serve.testing.server import (
    BalancedServer,
    expert_parallel_flags,
    installed_engine,
)
from ultraep_serve.testing.text import sample_text
from ultraep_serve.types import Policy, Verb

WORK = Path("results")
CONTEXT = 16384
RANK_PROCESSES = ("VLLM::Worker", "sglang::scheduler")
MODELS: dict[str, Callable[[], ModelSpec]] = {
    "qwen3": demo_qwen3,
    "glm4": demo_glm4,
    "balanced": demo_balanced,
}


def main() -> None:
    """Run one benchmark and write its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS))
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3")
    parser.add_argument("--mode", choices=("tensor", "data"), default="tensor")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--prompt-tokens", default="2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--out", type=Path, help="default: in benchmarks/results")
    options = parser.parse_args()
    options.engine = installed_engine()
    document = {"engine": options.engine, **BENCHMARKS[options.benchmark](options)}
    document["command"] = shlex.join(["python", *sys.argv])
    document["machine"] = machine()
    name = f"{'serving' if options.engine == 'vllm' else 'sglang'}-{options.benchmark}.json"
    write_json(options.out or Path("benchmarks/results") / name, document)


def model(name: str) -> Path:
    """The named model, made on first use."""
    path = WORK / "models" / name
    if not (path / "model.safetensors").exists():
        make_model(path, MODELS[name]())
    return path


def serve(options: argparse.Namespace, path: Path, dtype: str, *extra: str) -> BalancedServer:
    """A server for ``path`` under the benchmark's options."""
    flags = [*expert_parallel_flags(options.mode, dtype, CONTEXT, options.engine), *extra]
    flags += ["--enforce-eager"] if options.eager else []
    return BalancedServer(path, flags, WORK / "serving.log", engine=options.engine)


def ttft(options: argparse.Namespace) -> dict[str, Any]:
    """Time to first token under every policy."""
    return measure(options, options.model, (Policy.OFF, Policy.QUOTA, Policy.IDEAL))


def balanced(options: argparse.Namespace) -> dict[str, Any]:
    """What balancing costs where there is nothing to balance."""
    return measure(options, "balanced", (Policy.OFF, Policy.QUOTA))


def measure(options: argparse.Namespace, name: str, policies: tuple[Policy, ...]) -> dict[str, Any]:
    """``bench prefill`` against a server of our own."""
    prefill = PrefillOptions(
        prompt_tokens=tuple(int(length) for length in options.prompt_tokens.split(",")),
        policies=policies,
        repeats=options.repeats,
    )
    with (
        serve(options, model(name), "bfloat16", "--allow-ideal") as running,
        closing(Server(running.url)) as server,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        source = functools.partial(sample_text, "law")
        result = measure_with_progress(server, sidecar, source, prefill)
    document = prefill_document(result, server.url, name, "")
    Console().print(prefill_view(document))
    return document


def tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens, off against quota, in both parallel modes, compiled and eager."""
    prompts = mixed_prompts(options.prompts)
    rows = []
    is_vllm = options.engine == "vllm"
    modes, eagerness = (("tensor", "data"), (False, True)) if is_vllm else (("tensor",), (False,))
    cases = itertools.product(("float32", "bfloat16"), modes, eagerness)
    for dtype, options.mode, options.eager in cases:
        with serve(options, model(options.model), dtype) as running:
            check = check_tokens(running, prompts, concurrency=1).to_json(dtype)
        rows.append({"mode": options.mode, "eager": options.eager, **check})
        print(rows[-1], flush=True)
    return {"model": options.model, "max_tokens": 16, "rows": rows}


def logprobs(options: argparse.Namespace) -> dict[str, Any]:
    """bfloat16: how far log-probabilities move with balancing, and with another order alone.

    The control serves the same experts under other numbers, so on other ranks, without balancing:
    mathematically the same model, with sums taken in another order.
    """
    prompts = mixed_prompts(options.prompts)
    path = model(options.model)
    with serve(options, path, "bfloat16") as running:
        runs = {
            policy: (
                prompt_logprobs(running, policy, prompts),
                generate_under(running, policy, prompts),
            )
            for policy in (Policy.OFF, Policy.QUOTA)
        }
    permuted = permute_experts(path, WORK / "models" / f"{options.model}-permuted", seed=1)
    with serve(options, permuted, "bfloat16") as running:
        control = (
            prompt_logprobs(running, Policy.OFF, prompts),
            generate_under(running, Policy.OFF, prompts),
        )
    off = runs[Policy.OFF]
    document: dict[str, Any] = {
        "model": options.model,
        "mode": options.mode,
        "prompts": len(prompts),
    }
    for name, other in (("quota", runs[Policy.QUOTA]), ("control", control)):
        difference = np.abs(np.concatenate(off[0]) - np.concatenate(other[0]))
        document[name] = {
            "mean": float(difference.mean()),
            "p99": float(np.quantile(difference, 0.99)),
            "max": float(difference.max()),
            "positions": int(difference.size),
            "changed": float((difference > 0).mean()),
            "identical_prompts": compare_tokens(off[1], other[1]).identical,
        }
        print(name, document[name])
    return document


def layers(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted against measured time of a layer, in served batches of many sizes.

    Predicted twice: by the costs that the server measured when it started, and by a line (seconds
    over assignments of the busiest rank) fitted to every other batch. Both are held against the
    batches between; a batch's figures are the means over its layers.
    """
    chooser = random.Random(0)
    lengths = [chooser.randint(512, 8192) for _ in range(options.prompts)]
    with (
        serve(options, model(options.model), "bfloat16", "--allow-ideal") as running,
        closing(Server(running.url)) as server,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        server.first_token(sample_text("law", 2048, 1))
        for number, length in enumerate(lengths):
            sidecar.set_policy((Policy.QUOTA, Policy.IDEAL)[number % 4 == 3])
            server.first_token(sample_text("law", length, 100 + number))
        samples = layer_samples(run_directory_of_port(running.port))
        costs = measured_costs(running.log_path)
    fitted = fit(samples[::2])
    predictions: dict[str, Callable[[float], float]] = {
        "fitted_to_every_other_batch": fitted.predict,
        "measured_at_start": lambda work: costs.base_seconds + costs.seconds_per_assignment * work,
    }
    document = {
        "model": options.model,
        "mode": options.mode,
        "costs_measured_at_start": asdict(costs),
        "fitted": {"seconds_per_assignment": fitted.slope, "base_seconds": fitted.intercept},
        "held_out_batches": len(samples[1::2]),
        "relative_error": {
            name: errors(predict, samples[1::2]) for name, predict in predictions.items()
        },
        "samples": samples,
    }
    print({name: value for name, value in document.items() if name != "samples"})
    return document


def errors(
    predict: Callable[[float], float], samples: list[tuple[float, float]]
) -> dict[str, float]:
    """How far predictions are off, relative to what was measured."""
    signed = np.array([predict(work) / seconds - 1 for work, seconds in samples])
    off = np.abs(signed)
    return {
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "max": float(off.max()),
        "median_signed": float(np.median(signed)),
    }


def measured_costs(log_path: Path) -> CostModel:
    """The cost model that a server said at start it decides by."""
    _, found, rest = log_path.read_text(errors="replace").partition("ultraep: costs ")
    if not found:
        raise SystemExit(f"{log_path} tells no costs")
    return CostModel.from_json(rest.splitlines()[0])


def layer_samples(run_path: Path) -> list[tuple[float, float]]:
    """(assignments of the busiest rank, seconds of the engine's part) of a layer, batch by batch.

    A layer takes as long as its slowest rank; both are means over a batch's layers.
    """
    records = [RingReader(ring_path(run_path, rank)).recent() for rank in range(2)]
    seconds = {}
    for rank_records in records:
        for record in rank_records:
            key = (int(record["batch"]), int(record["layer"]))
            took = float(record["verb_ns"][Verb.COMPUTE]) / 1e9
            seconds[key] = max(took, seconds.get(key, 0.0))
    batches: dict[int, list[tuple[float, float]]] = {}
    for record in records[0]:
        batch, layer = int(record["batch"]), int(record["layer"])
        work = float(record["load_after"].max())
        batches.setdefault(batch, []).append((work, seconds[batch, layer]))
    means = [np.mean(layers, axis=0).tolist() for layers in batches.values()]
    return [(work, took) for work, took in means]


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Proportional set size of both ranks after a prefill, by policy, slots and slot memory."""
    rows = []
    prompt = sample_text("law", 4096, 1)
    cases = [("off", 0, "aliased")]
    cases += [("quota", slots, "aliased") for slots in (1, 2, 4, 8)]
    cases += [("quota", 8, "per_layer")]
    for policy, slots, kind in cases:
        extra = ["--policy", policy, "--slots", str(slots), "--slot-memory", kind]
        with serve(options, model(options.model), "bfloat16", *extra) as running:
            with closing(Server(running.url)) as server:
                server.first_token(prompt)
            workers = worker_memory(running.process_id)
        rows.append({"policy": policy, "slots": slots, "slot_memory": kind, "ranks": workers})
        print(rows[-1])
    return {"model": options.model, "mode": options.mode, "unit": "bytes", "rows": rows}


def worker_memory(ancestor: int) -> list[dict[str, int]]:
    """Memory of the engine's ranks below process ``ancestor``, from the kernel's own accounting."""
    rows = []
    for process in sorted(descendants(ancestor)):
        command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        if command.startswith(RANK_PROCESSES):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
            rows.append({name: sizes[name] for name in ("Rss", "Pss", "Pss_Anon", "Pss_Shmem")})
    return rows


def descendants(ancestor: int) -> set[int]:
    """Processes started by ``ancestor``, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {ancestor}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor, os.getpid()}


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    function.__name__: function for function in (ttft, balanced, tokens, logprobs, layers, memory)
}

if __name__ == "__main__":
    main()
