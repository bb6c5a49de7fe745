"""The sidecar under load: ranks that write and clients that send requests all the time.

    python benchmarks/sidecar_load.py --seconds 600 --json benchmarks/results/sidecar-load.json

Ranks write records at a steady pace, several of them from one process; what is written into a
record follows from the batch's number, so that a torn one would be noticed. The sidecar is a
process of its own. On few cores all of them compete: latencies include waiting for one.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
import httpx
import numpy as np
from served import sidecar
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.balance.topology import Location
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import LayerOutcome, LayerPlace, LayerRecord
from ultraep_serve.telemetry.recorder import Recorder, RingSettings
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingState
from ultraep_serve.types import Decision, ExpertShape, Policy

NUM_LAYERS = 16
PATHS = ("/v1/balance", "/v1/overview", "/v1/balance/batches", "/metrics", "/readyz")
BURSTS_PER_SECOND = 25
WRITERS = 2  # processes


def write(run_dir: str, ranks: range, shape: ExpertShape, per_second: int, stop: Any) -> None:
    """``ranks``: ``per_second`` records each, in bursts, until ``stop``."""
    settings = RingSettings(NUM_LAYERS, 4096, "load", "data", 0, 60.0)
    places = [Location.on_one_host(rank, shape.num_ranks) for rank in ranks]
    recorders = [Recorder.create(Path(run_dir), place, shape, settings) for place in places]
    for recorder in recorders:
        recorder.set_state(RingState.READY)
    burst = per_second // BURSTS_PER_SECOND // NUM_LAYERS
    batch, due = 0, time.monotonic()
    while not stop.is_set():
        for recorder in recorders:
            for number in range(batch, batch + burst):
                write_batch(recorder, number, shape)
        batch += burst
        # A writer that has fallen behind does not catch up: its pace is part of the result.
        now = time.monotonic()
        due = max(due + 1 / BURSTS_PER_SECOND, now)
        time.sleep(due - now)
    for recorder in recorders:
        recorder.close()


def write_batch(recorder: Recorder, batch: int, shape: ExpertShape) -> None:
    """Record all layers of ``batch``, from whose number every load follows."""
    num_ranks, num_experts = shape.num_ranks, shape.num_logical_experts
    outcome = LayerOutcome(
        decision=Decision.PLANNED,
        policy=Policy.QUOTA,
        expert_load=np.full(num_experts, 1 + batch % 1000),
        speed=np.full(num_ranks, FULL_SPEED),
        slot_expert=np.full((num_ranks, shape.num_slots), -1, np.int32),
        slot_load=np.zeros((num_ranks, shape.num_slots), np.int32),
    )
    for layer in range(NUM_LAYERS):
        recorder.record(
            LayerRecord.of(
                LayerPlace(batch, layer, tokens=1024),
                outcome,
                rank=0,
                expert_bytes=1000,
                bytes_sent=1000,
                stage_ns=[1000] * 7,
                experts_ns=0,
            )
        )


@dataclass
class Answers:
    """What the clients got."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)  # no answer, or not 200, by what came
    not_ready: int = 0  # 503 of /readyz: a rank's heartbeat was late, as on a busy machine
    torn: int = 0  # an imbalance other than 1 somewhere

    def add(self, path: str, took: float, answer: httpx.Response) -> None:
        self.seconds.setdefault(path, []).append(took)
        if path == "/readyz" and answer.status_code == 503:
            self.not_ready += 1
        elif answer.status_code != 200:
            self.lost[str(answer.status_code)] += 1
        elif path == "/v1/balance":
            imbalance = answer.json()["imbalance"]
            self.torn += any(imbalance[when]["max"] not in (None, 1.0) for when in imbalance)


async def send_requests(url: str, clients: int, until: float, pause: float) -> Answers:
    """``clients`` that request one path after the other until the monotonic time ``until``."""
    answers = Answers()
    limits = httpx.Limits(max_connections=clients)

    async def client(place: int, http: httpx.AsyncClient) -> None:
        await asyncio.sleep(pause * place / clients)
        while time.monotonic() < until:
            path = PATHS[place % len(PATHS)]
            began = time.monotonic()
            try:
                answer = await http.get(path)
                answers.add(path, time.monotonic() - began, answer)
            except httpx.HTTPError as error:
                answers.lost[type(error).__name__] += 1
            place += 1
            await asyncio.sleep(max(0.0, pause - (time.monotonic() - began)))

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
        await asyncio.gather(*(client(place, http) for place in range(clients)))
    return answers


def resident_mib(pid: int) -> float:
    """Memory of a process now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watch_memory(pid: int, until: float) -> list[float]:
    """Resident memory about every second."""
    seen = []
    while time.monotonic() < until:
        seen.append(round(resident_mib(pid), 1))
        await asyncio.sleep(1)
    return seen


def torn_records(reader: RingReader) -> int:
    """New records handed out by ``reader`` that do not follow from their batch."""
    records = reader.poll().records
    expected = (1 + records["batch"] % 1000).astype(np.int64)[:, None]
    per_rank = records["expert_load"].shape[1] // records["load_before"].shape[1]
    torn = (records["load_before"] != expected * per_rank).any(axis=1)
    return int((torn | (records["expert_load"] != expected).any(axis=1)).sum())


async def measure(
    url: str, pid: int, run_dir: Path, settings: argparse.Namespace
) -> dict[str, Any]:
    """Send requests and watch memory and records for as long as ``settings`` say."""
    until = time.monotonic() + settings.seconds
    torn = 0

    async def read_along() -> None:
        nonlocal torn
        readers = [RingReader(RunFiles(run_dir).ring(rank)) for rank in range(settings.ranks)]
        for reader in itertools.cycle(readers):
            if time.monotonic() > until:
                return
            torn += torn_records(reader)
            await asyncio.sleep(0.5)

    answers, memory, _ = await asyncio.gather(
        send_requests(url, settings.clients, until, settings.pause),
        watch_memory(pid, until),
        read_along(),
    )
    metrics = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    missed = sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics
        if line.startswith("ultraep_records_missed_total")
    )
    quarters = np.array_split(np.array(memory), 4)
    return {
        "responses": sum(map(len, answers.seconds.values())),
        "lost_responses": answers.lost.total(),
        "lost_by_kind": dict(answers.lost),
        "not_ready_responses": answers.not_ready,
        "torn_records": torn + answers.torn,
        "records_missed_by_the_sidecar": int(missed),
        "latency_ms": {path: latency(took) for path, took in sorted(answers.seconds.items())},
        "memory_mib": {
            "first": memory[0],
            "max": max(memory),
            "mean_by_quarter": [round(float(quarter.mean()), 1) for quarter in quarters],
        },
    }


def latency(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    p99 = float(np.percentile(seconds, 99))
    return {
        "count": len(seconds),
        "p50": round(statistics.median(seconds) * 1e3, 2),
        "p99": round(p99 * 1e3, 2),
        "max": round(max(seconds) * 1e3, 2),
    }


def main() -> None:
    """Start writers and the sidecar, measure, print, and write the result."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--records-per-second", type=int, default=2000, help="of each rank")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between a client's calls")
    settings = parser.parse_args()
    shape = ExpertShape(settings.ranks, 8 * settings.ranks, 2)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="uep-load-") as run_dir:
        page = ControlPage.create(Path(run_dir), Policy.QUOTA)
        arguments = (shape, settings.records_per_second, stop)
        ranks = range(settings.ranks)
        writers = [
            context.Process(target=write, args=(run_dir, ranks[place::WRITERS], *arguments))
            for place in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        try:
            measured = run_sidecar(Path(run_dir), settings)
        finally:
            stop.set()
            for writer in writers:
                writer.join()
            page.close()
    result = {
        "schema_version": 1,
        "settings": {k: v for k, v in vars(settings).items() if k != "json"},
        "shape": asdict(shape),
        **measured,
    }
    print(json.dumps(result, indent=2))
    harness.write(settings.json, result)


def run_sidecar(run_dir: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Measure a sidecar over ``run_dir``, once all ranks write."""
    with sidecar(run_dir) as (process, url):
        before = records_written(run_dir, settings.ranks)
        began = time.monotonic()
        measured = asyncio.run(measure(url, process.pid, run_dir, settings))
        written = records_written(run_dir, settings.ranks) - before
        measured["records_per_second"] = round(written / (time.monotonic() - began))
        measured["sidecar_cpu_seconds"] = round(cpu_seconds(process.pid), 1)
        return measured


def records_written(run_dir: Path, num_ranks: int) -> int:
    """By all ranks."""
    return sum(
        RingReader(RunFiles(run_dir).ring(rank)).header().written for rank in range(num_ranks)
    )


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
