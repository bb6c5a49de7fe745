"""Samples in service on a real server: what they cost, and that a fault switches balancing off.

    python benchmarks/verification.py --json benchmarks/results/verification.json

A server with two expert-parallel ranks on this machine. Prompts of 2048 tokens first with the
default of ``--verify-every``: the time of samples over that of prefill batches, as ranks count it.
Then with ``--verify-every 1``: what one sample takes, from which the share by other settings
follows, with an interval over portions of prompts. At last one bit in a slot of the second rank is
flipped in each layer from a moment on: how many prompts later all ranks are off, while prompts go
on being answered. Exits with 1 if that does not happen, or if anything was in doubt before.
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
from served import CONTEXT, WORK, model

from ultraep_serve.lab.demo.balanced_server import BalancedServer, expert_parallel_flags
from ultraep_serve.lab.demo.text import DOMAINS, sample_text
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Policy, VerificationCheck

PROMPT_TOKENS, SHARE = 2048, 0.002
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
    parser.add_argument("--prompts", type=int, default=160, help="for each setting")
    parser.add_argument("--portion", type=int, default=8, help="prompts of one ratio")
    parser.add_argument("--mode", choices=("tensor", "data"), default="tensor")
    options = parser.parse_args()
    document: dict[str, Any] = {}
    for name, flags in (("default", []), ("each_layer", ["--verify-every", "1"])):
        with serving(options, *flags) as (server, trigger):
            found = measure(server, options)
            if flags:
                document["fault"] = inject(server, trigger, options.prompts)
        document[name] = found
        print(name, json.dumps(found), flush=True)
    document["layers_between_samples_for_0.2_percent"] = (
        document["each_layer"]["sample_over_layer"]["high"] / SHARE
    )
    print(json.dumps(document["fault"]), document["layers_between_samples_for_0.2_percent"])
    harness.write(options.json, document)
    fault = document["fault"]
    right = fault["is_in_doubt"] and fault["answered"] == fault["asked"]
    return 0 if right and not any(document[name]["failures"] for name in document_names) else 1


document_names = ("default", "each_layer")


@contextlib.contextmanager
def serving(options: argparse.Namespace, *extra: str) -> Iterator[tuple[Server, Path]]:
    """A server, and the file that starts the fault."""
    flags = [*expert_parallel_flags(options.mode, "bfloat16", CONTEXT), "--enforce-eager", *extra]
    with tempfile.TemporaryDirectory() as folder:
        trigger = Path(folder) / "fault"
        (Path(folder) / "sitecustomize.py").write_text(
            FAULT.replace("{trigger!r}", repr(str(trigger)))
        )
        server = Server(model("qwen3"), flags, WORK / "verification.log")
        server.modules = Path(folder)
        with server:
            yield server, trigger


def ask(server: Server, seed: int) -> bool:
    """Whether a prompt that no cache holds is answered."""
    text = sample_text(DOMAINS[seed % len(DOMAINS)], PROMPT_TOKENS, seed)
    body = {"model": server.model, "prompt": text, "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200


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
    for seed in range(8):
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
