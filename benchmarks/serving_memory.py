"""Memory of a server's ranks by number of slots, from the kernel's own accounting."""

import argparse
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from served import model, serve

from ultraep_serve.lab.bench.engine import Server
from ultraep_serve.lab.demo.text import sample_text

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
