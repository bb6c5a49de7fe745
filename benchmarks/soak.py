"""A server under mixed traffic for long: wrong answers, and what its processes come to hold.

    python benchmarks/soak.py

Clients ask prompts of mixed lengths, leave some of their requests, and an operator sets another
policy every second. Every answer is compared with the one that its prompt got alone, with balancing
off, in float32. Exits with 1 if one was wrong.
"""

import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import httpx
import psutil
from served import add_server_flags, model, serve

from ultraep_lab.bench.greedy_tokens import Generation, compare_tokens, generate
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under, mixed_prompts
from ultraep_serve.types import Policy

CLIENTS = 4
MAX_TOKENS = 16
LEFT_PART = 0.2  # of the requests are given up by their client
PAUSE_SECONDS = 0.5  # between the requests of a client, on average


def main() -> int:
    """Serve and ask, note what is held now and then, write the JSON."""
    parser = harness.parser(__doc__, "soak.json")
    add_server_flags(parser)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--every", type=int, default=600, help="seconds between footprints")
    options = parser.parse_args()
    prompts, rows = mixed_prompts(options.prompts), []
    with serve(options, model(options.model), "float32", prefix_cache=True) as running:
        expected = generate_under(running, Policy.OFF, prompts, MAX_TOKENS, concurrency=1)
        traffic = Traffic(running, prompts, expected)
        with repeated(traffic.request, CLIENTS), repeated(traffic.switch, 1):
            started = time.monotonic()
            for number in range(1, options.seconds // options.every + 1):
                time.sleep(max(0.0, started + number * options.every - time.monotonic()))
                rows.append({"seconds": number * options.every, "processes": held(running)})
                print(rows[-1]["seconds"], dict(traffic.seen), flush=True)
    found = {"seen": dict(traffic.seen), "wrong": traffic.wrong, "footprints": rows}
    harness.write(options.json, {"model": options.model, "mode": options.mode, **found})
    return 1 if traffic.wrong else 0


class Traffic:
    """What clients and an operator do to one server, and what became of it."""

    def __init__(
        self, server: BalancedServer, prompts: list[str], expected: list[Generation]
    ) -> None:
        self._server, self._prompts, self._expected = server, prompts, expected
        self._sidecar = Sidecar(server.sidecar_url, server.token)
        self._policies = itertools.cycle((Policy.QUOTA, Policy.OFF))
        self._random = random.Random(0)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    def switch(self) -> None:
        """Put the next policy in force, for a second."""
        self._sidecar.set_policy(next(self._policies))
        self.seen["policy switches"] += 1
        time.sleep(1.0)

    def request(self) -> None:
        """One request of a client, and its pause."""
        number = self._random.randrange(len(self._prompts))
        tokens = self._random.randint(1, MAX_TOKENS)
        if self._random.random() < LEFT_PART:
            self._leave(self._prompts[number])
        else:
            self._compare(number, tokens)
        time.sleep(self._random.expovariate(1 / PAUSE_SECONDS))

    def _compare(self, number: int, tokens: int) -> None:
        url, model = self._server.url, self._server.model
        expected = [Generation(*(each[:tokens] for each in self._expected[number]))]
        answer = generate(url, model, [self._prompts[number]], tokens, 1)
        self.seen["answers"] += 1
        if not compare_tokens(expected, answer).same:
            found = answer[0].tokens, expected[0].tokens
            self.wrong.append(f"prompt {number}: {found[0]}, not {found[1]}")

    def _leave(self, prompt: str) -> None:
        """Close the connection after the first token."""
        request = {"model": self._server.model, "prompt": prompt, "max_tokens": 400, "stream": True}
        url = f"{self._server.url}/v1/completions"
        with httpx.stream("POST", url, json=request, timeout=600.0, trust_env=False) as response:
            response.raise_for_status()
            next(response.iter_lines())
        self.seen["left by their client"] += 1


@contextmanager
def repeated(act: Callable[[], None], threads: int) -> Iterator[None]:
    """Inside, so many threads repeat ``act``; at the end, raises what one of them raised."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.is_set():
                act()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]


def held(running: BalancedServer) -> dict[str, Any]:
    """What every process of the server holds, by its number and title."""
    server = psutil.Process(running.process_id)
    return {
        f"{process.pid} {' '.join(process.cmdline())[:60]!a}": {
            "resident_kibibytes": process.memory_info().rss >> 10,
            "mappings": len(process.memory_maps(grouped=False)),
            "descriptors": process.num_fds(),
        }
        for process in [server, *server.children(recursive=True)]
    }


if __name__ == "__main__":
    sys.exit(main())
