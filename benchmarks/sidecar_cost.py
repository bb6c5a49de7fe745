"""What the sidecar costs the engine: time to first token without it, with it, and watched.

    python benchmarks/sidecar_cost.py

One balanced server and one sidecar apart from it. Request by request the sidecar is stopped
(SIGSTOP: it then takes nothing but memory), runs, or runs with somebody watching: all that the
open page asks for, and Prometheus scraping every five seconds. Ranks write their records in all
three. Every prompt of a round is the same text behind another opening, in changing order.
Writes benchmarks/results/sidecar-cost.json.
"""

import argparse
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from served import CONTEXT, WORK, model

from ultraep_serve.client.engine import Server
from ultraep_serve.client.prefill import Spread, ratios_json
from ultraep_serve.client.prompts import Openings, fitted_prompt
from ultraep_serve.demo.balanced_server import (
    BalancedServer,
    expert_parallel_flags,
    installed_engine,
)
from ultraep_serve.demo.text import sample_text
from ultraep_serve.files import write_json
from ultraep_serve.launcher.run_directory import run_directory_of_port
from ultraep_serve.machine import describe

VARIANTS = ("without", "with", "watched")
SCRAPE_SECONDS = 5.0
PAGE_SECONDS = 2.0
PAGE_PATHS = ("history", "heatmap", "batches", "policies")  # what the page asks for again and again
SETTLE_SECONDS = 2.0  # after a change: the sidecar catches up, a page has loaded
START_SECONDS = 30.0


def main() -> None:
    """Serve, measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=24, help="rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sidecar-cost.json"))
    options = parser.parse_args()
    engine = installed_engine()
    flags = [*expert_parallel_flags("tensor", "bfloat16", CONTEXT, engine), "--no-sidecar"]
    with (
        BalancedServer(model("qwen3"), flags, WORK / "serving.log", engine=engine) as running,
        closing(Server(running.url)) as server,
        sidecar(running.port) as (process, url),
    ):
        samples = measure(server, process, url, options)
    document = {
        "engine": engine,
        "prompt_tokens": options.prompt_tokens,
        **summary(samples),
        "ttft_samples": samples,
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe(),
    }
    print(document["ttft_seconds"], document["paired"])
    write_json(options.out, document)


@contextmanager
def sidecar(engine_port: int) -> Iterator[tuple[int, str]]:
    """A sidecar apart from the server on ``engine_port``: its process id and address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ultraep_serve.cli", "sidecar"]
    command += ["--run-dir", str(run_directory_of_port(engine_port)), "--port", str(port)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url)
        yield process.pid, url
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(httpx.TransportError):  # not listening yet
            if httpx.get(f"{url}/readyz").is_success:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"the sidecar at {url} is not ready")
        time.sleep(0.2)


def measure(
    server: Server, process: int, url: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds to the first token by variant, one per round; the first two rounds are not kept."""
    openings = Openings()
    orders = list(itertools.permutations(VARIANTS))
    samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(-2, options.repeats):
        prompts = [
            fitted_prompt(
                openings,
                lambda tokens, seed: sample_text("law", tokens, seed),
                options.prompt_tokens,
                1000 * (number + 3),
                server.count_tokens,
            )
            for _ in VARIANTS
        ]
        for variant, prompt in zip(orders[number % len(orders)], prompts, strict=True):
            with as_in(variant, process, url):
                seconds = server.first_token(prompt).seconds
            if number >= 0:
                samples[variant].append(seconds)
    return samples


@contextmanager
def as_in(variant: str, process: int, url: str) -> Iterator[None]:
    """The sidecar, and who watches it, as in ``variant``."""
    os.kill(process, signal.SIGSTOP if variant == "without" else signal.SIGCONT)
    over = threading.Event()
    watchers = []
    if variant == "watched":
        watchers = [threading.Thread(target=look, args=(url, over)) for look in LOOKS]
    for watcher in watchers:
        watcher.start()
    time.sleep(SETTLE_SECONDS)
    try:
        yield
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


def follow(url: str, over: threading.Event) -> None:
    """The page's live events, until ``over``."""
    with httpx.stream("GET", f"{url}/v1/events", params={"seconds": 60}) as events:
        for _ in events.iter_lines():
            if over.is_set():
                return


def refresh(url: str, over: threading.Event) -> None:
    """What the page asks for besides."""
    with httpx.Client(base_url=url) as client:
        while True:
            for path in PAGE_PATHS:
                client.get(f"/v1/balance/{path}").raise_for_status()
            if over.wait(PAGE_SECONDS):
                return


def scrape(url: str, over: threading.Event) -> None:
    """What Prometheus does, more often."""
    with httpx.Client(base_url=url) as client:
        while True:
            client.get("/metrics").raise_for_status()
            if over.wait(SCRAPE_SECONDS):
                return


LOOKS = (follow, refresh, scrape)


def summary(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and ratios within a round with their spread."""
    paired = {}
    for variant in VARIANTS[1:]:
        ratios = [a / b for a, b in zip(samples[variant], samples["without"], strict=True)]
        paired[f"{variant}_over_without"] = ratios_json(ratios)
    medians = {variant: Spread.of(values).median for variant, values in samples.items()}
    return {"ttft_seconds": medians, "paired": paired}


if __name__ == "__main__":
    main()
