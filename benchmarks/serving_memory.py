"""What a server takes beside its answers: memory of its ranks, by allocator too; time to start."""

import argparse
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from served import model, serve, serve_without_ep

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import balanced_orders, ratios_json
from ultraep_lab.bench.prompts import Openings
from ultraep_lab.demo.server_process import ServerProcess
from ultraep_lab.demo.text import sample_text

ALLOCATORS = {"glibc": {"LD_PRELOAD": ""}, "tcmalloc": {}}  # the second is the launcher's default
SETTLE_SECONDS = 1.2  # an engine polls for a while when it has answered
RANK_PROCESSES = ("VLLM::Worker", "sglang::scheduler")


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


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Time until a server is ready, and its ranks' memory after a prefill, each started anew.

    Without expert parallelism the engine is alone; with it, balancing is off or on. The first
    round, which fills caches of compiled code, is not counted.
    """
    contenders = ("without_ep", "off", "quota")
    orders = balanced_orders(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, list[list[dict[str, int]]]] = {name: [] for name in contenders}
    for place in range(1 + options.repeats):
        for name in orders[place % len(orders)]:
            began = time.monotonic()
            with _started(options, name) as running:
                took = time.monotonic() - began
                with closing(Server(running.url)) as server:
                    server.first_token(sample_text("law", 4096, 1))
                workers = worker_memory(running.process_id)
            print(f"{place} {name}: ready in {took:.1f} s", flush=True)
            if place > 0:
                seconds[name].append(took)
                memory[name].append(workers)
    return {
        "model": options.model,
        "mode": options.mode,
        "rounds": options.repeats,
        "ready_seconds": {name: median(samples) for name, samples in seconds.items()},
        "ready_samples": seconds,
        "ready_ratios": _ratios(seconds),
        "rank_bytes": {
            name: median(rank["Pss"] for ranks in samples for rank in ranks)
            for name, samples in memory.items()
        },
        "rank_memory": memory,
    }


def allocator(options: argparse.Namespace) -> dict[str, Any]:
    """Time to first token of two balanced servers, with either allocator, and memory of ranks.

    They take turns with the same text; the first round is not counted.
    """
    path, openings = model(options.model), Openings()
    rows, orders = [], balanced_orders(tuple(ALLOCATORS))
    with ExitStack() as stack:
        servers, running = {}, {}
        for name, variables in ALLOCATORS.items():
            with patch.dict(os.environ, variables):
                running[name] = stack.enter_context(serve(options, path, "bfloat16"))
            servers[name] = stack.enter_context(closing(Server(running[name].url)))
        for length in options.prompt_tokens:
            samples: dict[str, list[float]] = {name: [] for name in ALLOCATORS}
            for place in range(1 + options.repeats):
                text = sample_text("law", length, place)
                prompt = f"{openings.next(text)} {text}"
                for name in orders[place % len(orders)]:
                    time.sleep(SETTLE_SECONDS)
                    seconds = servers[name].first_token(prompt).seconds
                    if place > 0:
                        samples[name].append(seconds)
            pairs = zip(samples["tcmalloc"], samples["glibc"], strict=True)
            ratios = ratios_json([one / other for one, other in pairs])
            rows.append(
                {
                    "prompt_tokens": length,
                    "ttft_seconds": {name: median(found) for name, found in samples.items()},
                    "paired": {"tcmalloc_over_glibc": ratios},
                    "ttft_samples": samples,
                    "ranks": {name: worker_memory(of.process_id) for name, of in running.items()},
                }
            )
            print(length, rows[-1]["ttft_seconds"], ratios, rows[-1]["ranks"], flush=True)
    return {"model": options.model, "mode": options.mode, "rows": rows}


def _started(options: argparse.Namespace, name: str) -> ServerProcess:
    if name == "without_ep":
        return serve_without_ep(options, model(options.model), "bfloat16")
    return serve(options, model(options.model), "bfloat16", "--policy", name)


def _ratios(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Of quota's time to each other's, within rounds."""
    return {
        f"quota_over_{base}": ratios_json(
            [one / other for one, other in zip(seconds["quota"], seconds[base], strict=True)]
        )
        for base in ("without_ep", "off")
    }


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
