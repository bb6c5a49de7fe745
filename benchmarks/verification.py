"""Samples in service on a real server: what they cost, and that a fault switches balancing off.

    python benchmarks/verification.py --json benchmarks/results/verification.json

Servers with two expert-parallel ranks of this environment's engine on this machine. First one with
the default of ``--verify-every`` and one with 0 are asked the same prompts in turn: the ratio of
the times of prefill (2048 tokens, one to answer) and of decode (64 tokens to answer), with its
interval over pairs. Then one with ``--verify-every 1``: what a sample takes as ranks count it, from
which the share by other settings follows. At last one bit in a slot of the second rank is flipped
in each layer from a moment on: how many prompts later all ranks are off, while prompts go on being
answered. Exits with 1 if that does not happen, or if anything was in doubt before.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import httpx
import numpy as np
from numpy.typing import NDArray
from served import CONTEXT, WORK, model

from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    expert_parallel_flags,
    installed_engine,
)
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Policy, VerificationCheck

PROMPT_TOKENS, DECODE_PROMPT_TOKENS, SHARE = 2048, 16, 0.002
DECODES, DECODE_TOKENS = 8, 64  # prompts, and tokens to answer each
# Python runs this at the start of every process of the server; nothing of it is in the product.
FAULT = """
import importlib.abc, importlib.util, os, sys

class Faulty(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "ultraep_serve.balance.host.fabric":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            fabric, wait = module.HostFabric, module.HostFabric.wait_slots
            def wait_slots(self, layer, slot_expert):
                wait(self, layer, slot_expert)
                if self.rank == 1 and os.path.exists({trigger!r}):
                    import torch
                    first = layer.tensors[0].shape[0] - slot_expert.shape[1]
                    layer.tensors[0][first:].view(torch.uint8).view(-1)[100] ^= 8
            fabric.wait_slots = wait_slots
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Faulty())
"""


class Server(BalancedServer):
    """With a folder of modules of its own."""

    modules: Path

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.modules), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "PYTHONPATH": path}


def main() -> int:
    """Print what was found, and write it to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=160, help="of the server with every layer")
    parser.add_argument("--pairs", type=int, default=400, help="of prompts to two servers; 0: not")
    parser.add_argument("--portion", type=int, default=8, help="prompts of one ratio")
    parser.add_argument("--mode", choices=("tensor", "data"), default="tensor")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    document: dict[str, Any] = {"engine": installed_engine(), "dtype": options.dtype}
    if not options.pairs and options.json and options.json.exists():
        earlier = json.loads(options.json.read_text())
        document |= {name: earlier[name] for name in ("default_over_never",) if name in earlier}
    if options.pairs:
        with serving(options) as (checked, _), serving(options, "--verify-every", "0") as (not_, _):
            document["default_over_never"] = alternated(checked, not_, options.pairs)
            failures = sum(sum(header.verification_failures) for header in headers(checked))
            document["default_over_never"] |= {"failures": failures, "command": harness.command()}
        print(json.dumps(document["default_over_never"]), flush=True)
        harness.write(options.json, document)
    with serving(options, "--verify-every", "1") as (server, trigger):
        document["each_layer"] = measure(server, options)
        document["each_layer_decode"] = decode(server)
        document["fault"] = inject(server, trigger, options.prompts)
    document["layers_between_samples_for_0.2_percent"] = (
        document["each_layer"]["sample_over_layer"]["high"] / SHARE
    )
    print(json.dumps(document, indent=1))
    harness.write(options.json, document)
    fault = document["fault"]
    right = fault["is_in_doubt"] and fault["answered"] == fault["asked"]
    measured = ("default_over_never", "each_layer")
    return (
        0 if right and not any(document.get(name, {}).get("failures") for name in measured) else 1
    )


@contextlib.contextmanager
def serving(options: argparse.Namespace, *extra: str) -> Iterator[tuple[Server, Path]]:
    """A server, and the file that starts the fault."""
    engine = installed_engine()
    flags = [*expert_parallel_flags(options.mode, options.dtype, CONTEXT, engine), *extra]
    flags += ["--enforce-eager"] if engine == "vllm" else []
    with tempfile.TemporaryDirectory() as folder:
        trigger = Path(folder) / "fault"
        (Path(folder) / "sitecustomize.py").write_text(
            FAULT.replace("{trigger!r}", repr(str(trigger)))
        )
        log = WORK / f"verification{''.join(extra)}.log"
        server = Server(model("qwen3"), flags, log, engine)
        server.modules = Path(folder)
        with server:
            yield server, trigger


def ask(server: Server, seed: int, tokens: int = 1) -> bool:
    """Whether a prompt that no cache holds is answered, with so many tokens."""
    size = PROMPT_TOKENS if tokens == 1 else DECODE_PROMPT_TOKENS
    text = sample_text(DOMAINS[seed % len(DOMAINS)], size, seed)
    body = {"model": str(server.model), "prompt": text, "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200


def alternated(one: Server, other: Server, pairs: int) -> dict[str, Any]:
    """Ratios of times of ``one`` to those of ``other``, which are asked the same in turn."""
    found: dict[str, Any] = {"pairs": pairs}
    for name, tokens, number in (
        ("prefill", 1, pairs),
        ("decode", DECODE_TOKENS, max(2, pairs // 8)),
    ):
        seconds = np.zeros((number, 2))
        for seed in range(-4, number):  # the first ones warm both up
            for turn in (0, 1) if seed % 2 else (1, 0):
                started = time.perf_counter()
                ask((one, other)[turn], 1000 + seed, tokens)
                if seed >= 0:
                    seconds[seed, turn] = time.perf_counter() - started
        ratios = seconds[:, 0] / seconds[:, 1]
        found[name] = {
            "median_seconds": np.median(seconds, axis=0).tolist(),
            "median_ratio": float(np.median(ratios)),
            "median_ratio_interval": median_interval(ratios),
            "mean_log_ratio": interval(list(np.log(ratios))),
        }
    return found


def median_interval(values: NDArray[np.float64]) -> list[float]:
    """95 % interval of the median of ``values`` (n,), by drawing from them again."""
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(values, (4000, values.size)), axis=1)
    return [float(bound) for bound in np.quantile(drawn, (0.025, 0.975))]


def headers(server: Server) -> list[RingHeader]:
    """What both ranks have counted, after their next heartbeat."""
    time.sleep(1.5)
    found = []
    for rank in range(2):
        with contextlib.closing(RingReader(RunFiles(server.run_path).ring(rank))) as ring:
            found.append(ring.header())
    return found


def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Time of samples over time of layers, in portions, whose spread gives the interval."""
    for seed in range(options.portion):
        ask(server, 500 + seed)
    ratios, per_sample, seed, samples = [], [], 0, 0
    before, prefill_ns = headers(server), 0
    first = before
    while seed < options.prompts:
        started = time.perf_counter_ns()
        for _ in range(options.portion):
            ask(server, seed)
            seed += 1
        elapsed = time.perf_counter_ns() - started
        after = headers(server)
        spent = max(
            b.verification_ns - a.verification_ns for a, b in zip(before, after, strict=True)
        )
        plans = VerificationCheck.PLANS
        taken = after[0].verified_layers[plans] - before[0].verified_layers[plans]
        layers = sum(after[0].layers) - sum(before[0].layers)
        ratios.append(spent / elapsed)
        if taken:
            per_sample.append(spent / taken / (elapsed / layers))
        samples, prefill_ns, before = samples + taken, prefill_ns + elapsed, after
    last = headers(server)
    return {
        "prompts": seed,
        "prefill_seconds": prefill_ns / 1e9,
        "samples": samples,
        "verification_ns": [
            b.verification_ns - a.verification_ns for a, b in zip(first, last, strict=True)
        ],
        "verified_layers": last[0].verified_layers,
        "verification_over_prefill": interval(ratios),
        "sample_over_layer": interval(per_sample) if per_sample else None,
        "failures": sum(sum(header.verification_failures) for header in last),
    }


def decode(server: Server) -> dict[str, Any]:
    """How many layers are checked in decode, and the time that it takes, by rank."""
    before = headers(server)
    for seed in range(800, 800 + DECODES):
        ask(server, seed, DECODE_TOKENS)
    after = headers(server)
    pairs = list(zip(before, after, strict=True))
    return {
        "tokens": DECODES * DECODE_TOKENS,
        "samples": [sum(b.verified_layers) - sum(a.verified_layers) for a, b in pairs],
        "verification_ns": [b.verification_ns - a.verification_ns for a, b in pairs],
    }


def interval(values: list[float]) -> dict[str, float]:
    """Mean and its 95 % interval."""
    made = np.array(values)
    half = 1.96 * made.std(ddof=1) / made.size**0.5 if made.size > 1 else float("nan")
    mean = float(made.mean())
    return {"mean": mean, "low": mean - float(half), "high": mean + float(half)}


def inject(server: Server, trigger: Path, most: int) -> dict[str, Any]:
    """Flip a bit from now on; the prompts until all ranks are off, and whether serving goes on."""
    trigger.touch()
    page = ControlPage.open(server.run_path)
    answered, batches = 0, 0
    for seed in range(600, 600 + min(most, 20)):
        answered += ask(server, seed)
        batches += not page.is_in_doubt
    reports = [RunFiles(server.run_path).verification(rank) for rank in range(2)]
    found = [json.loads(path.read_text()) for path in reports if path.exists()]
    last = headers(server)
    off = page.policy
    trigger.unlink()
    server.set_policy(Policy.QUOTA)
    back = ask(server, 700) and ask(server, 701)
    return {
        "asked": min(most, 20),
        "answered": answered,
        "prompts_until_off": batches + 1,
        "is_in_doubt": bool(found) and off is Policy.OFF,
        "failures": [header.verification_failures for header in last],
        "reports": found,
        "in_doubt_after_a_policy_was_set": page.is_in_doubt,
        "answers_after_that": back,
    }


if __name__ == "__main__":
    sys.exit(main())
