"""What the sidecar costs the engine: time to first token without it, with it, and watched.

    python benchmarks/sidecar_cost.py

One balanced server and one sidecar apart from it. Request by request the sidecar is stopped
(SIGSTOP: it then takes nothing but memory), runs, or is watched: with all requests of the open
page, and Prometheus scraping every five seconds. Ranks write their records in all
three. Every prompt of a round is the same text behind another opening, in changing order.
"""

import argparse
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import harness
import httpx
from served import CONTEXT, WORK, model, sidecar

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import ratios_json, spread_of
from ultraep_lab.bench.prompts import Openings, fitted_prompt
from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    expert_parallel_flags,
    installed_engine,
)
from ultraep_lab.demo.text import sample_text
from ultraep_serve.telemetry.run_directory import run_directory_of_port

VARIANTS = ("without", "with", "watched")
SCRAPE_SECONDS = 5.0
PAGE_SECONDS = 2.0
PAGE_PATHS = ("history", "heatmap", "batches", "policies")  # what the page requests repeatedly
SETTLE_SECONDS = 2.0  # after a change: the sidecar catches up, a page has loaded


def main() -> None:
    """Serve, measure, print a table, write the JSON."""
    parser = harness.parser(__doc__, "sidecar-cost.json")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=24, help="rounds")
    options = parser.parse_args()
    engine = installed_engine()
    flags = [*expert_parallel_flags("tensor", "bfloat16", CONTEXT, engine), "--no-sidecar"]
    with (
        BalancedServer(model("qwen3"), flags, WORK / "serving.log", engine=engine) as running,
        closing(Server(running.url)) as server,
        sidecar(run_directory_of_port(running.port)) as (process, url),
    ):
        try:
            samples = measure(server, process.pid, url, options)
        finally:
            process.send_signal(signal.SIGCONT)
    document = {
        "engine": engine,
        "prompt_tokens": options.prompt_tokens,
        **summary(samples),
        "ttft_samples": samples,
    }
    print(document["ttft_seconds"], document["paired"])
    harness.write(options.json, document)


def measure(
    server: Server, process: int, url: str, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds to the first token by variant, one per round; the first two rounds are not kept."""
    openings = Openings()
    orders = list(itertools.permutations(VARIANTS))
    samples: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(-2, options.repeats):
        text, length, seed = partial(sample_text, "law"), options.prompt_tokens, 1000 * (number + 3)
        prompts = [
            fitted_prompt(openings, text, length, seed, server.count_tokens) for _ in VARIANTS
        ]
        for variant, prompt in zip(orders[number % len(orders)], prompts, strict=True):
            with as_in(variant, process, url):
                seconds = server.first_token(prompt).seconds
            if number >= 0:
                samples[variant].append(seconds)
    return samples


@contextmanager
def as_in(variant: str, process: int, url: str) -> Iterator[None]:
    """The sidecar, and what watches it, as in ``variant``."""
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
    """The page's other requests."""
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
    medians = {variant: spread_of(values)["median"] for variant, values in samples.items()}
    return {"ttft_seconds": medians, "paired": paired}


if __name__ == "__main__":
    main()
