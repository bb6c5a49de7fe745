"""A server under mixed traffic for long, and one that starts and ends often."""

import argparse
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness  # noqa: F401
import httpx
from served import model, serve, serve_without_ep
from serving_memory import descendants

from tests.support.endurance import Footprint
from ultraep_lab.bench.greedy_tokens import Generation, generate
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under, mixed_prompts
from ultraep_serve.balance.topology import is_process_alive
from ultraep_serve.types import Policy

CLIENTS = 4
MAX_TOKENS = 16
LEFT_PART = 0.2  # of the requests are given up by their client
PAUSE_SECONDS = 0.5  # between the requests of a client, on average
SETTLE_SECONDS = 3.0  # for what ends a little later than its server
ROLES = {  # by a part of the command line
    "ultraep_serve.sidecar": "sidecar",
    "ultraep_serve.cli": "launcher",
    "api_server": "API server",
    "launch_server": "API server",
    "resource_tracker": "resource tracker",
}


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Mixed traffic for ``--seconds``, another policy every second: tokens, and what is held.

    Every answer is compared with the one that its prompt got alone, with balancing off. What the
    engine alone comes to hold is shown by ``--policies off``.
    """
    prompts = mixed_prompts(options.prompts)
    rows: list[dict[str, Any]] = []
    with serve(options, model(options.model), "float32", prefix_cache=True) as running:
        expected = generate_under(running, Policy.OFF, prompts, MAX_TOKENS, concurrency=1)
        traffic = Traffic(running, prompts, expected, options.policies)
        with repeated(traffic.request, CLIENTS), repeated(traffic.switch, 1):
            started = time.monotonic()
            for number in range(1, options.seconds // options.every + 1):
                time.sleep(max(0.0, started + number * options.every - time.monotonic()))
                answers = traffic.seen["answers"]
                rows.append(
                    {
                        "seconds": number * options.every,
                        "answers": answers,
                        "processes": held(running),
                    }
                )
                print(rows[-1]["seconds"], dict(traffic.seen), flush=True)
        with closing(Sidecar(running.sidecar_url, running.token)) as sidecar:
            skipped = sidecar.get("/v1/balance")["batches"]["skipped"]
    return {
        "model": options.model,
        "mode": options.mode,
        "policies": [policy.value for policy in options.policies],
        "seen": dict(traffic.seen),
        "wrong": traffic.wrong,
        "skipped_by_reason": skipped,
        "footprints": rows,
    }


class Traffic:
    """What clients and an operator do to one server, and what became of it."""

    def __init__(
        self,
        server: BalancedServer,
        prompts: list[str],
        expected: list[Generation],
        policies: Sequence[Policy],
    ) -> None:
        self._server, self._prompts, self._expected = server, prompts, expected
        self._sidecar = Sidecar(server.sidecar_url, server.token)
        self._policies = itertools.cycle(policies)
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
        prompt, expected = self._prompts[number], self._expected[number].token_ids
        (answer,) = generate(self._server.url, self._server.model, [prompt], tokens, 1)
        assert expected is not None
        assert answer.token_ids is not None
        self.seen["answers"] += 1
        if answer.token_ids != expected[:tokens]:
            self.wrong.append(f"prompt {number}: {answer.token_ids}, not {expected[:tokens]}")

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


def held(running: BalancedServer) -> dict[str, dict[str, int]]:
    """What every process of the server holds, by its role or else its title."""
    processes: dict[str, dict[str, int]] = {}
    for process in sorted(descendants(running.process_id) | {running.process_id}):
        command = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        title = command.split("\0")[0].strip()
        role = next((name for part, name in ROLES.items() if part in command), title)
        processes[role] = asdict(Footprint.of(process))
    return processes


def restarts(options: argparse.Namespace) -> dict[str, Any]:
    """A server that starts, answers and ends so often: what is left of it, and its answers.

    Before that, once, the engine alone: what it leaves is its own. Others must not make files in
    shared memory meanwhile, or it runs in namespaces of its own:
    ``unshare -mpf --mount-proc sh -c 'mount -t tmpfs shm /dev/shm && python ...; true'``.
    """
    prompts = mixed_prompts(4)
    before = left()
    with serve_without_ep(options, model(options.model), "float32"):
        pass
    engine_alone = after(before)
    before |= engine_alone
    expected: list[Generation] = []
    rows: list[dict[str, Any]] = []
    for number in range(1, options.restarts + 1):
        started = time.monotonic()
        with serve(options, model(options.model), "float32") as running:
            ready = time.monotonic()
            answers = generate_under(running, Policy.QUOTA, prompts, MAX_TOKENS)
            expected = expected or answers
            ending = time.monotonic()
        ended = time.monotonic()
        rows.append(
            {
                "start_seconds": ready - started,
                "stop_seconds": ended - ending,
                "same_tokens": [one.token_ids for one in answers]
                == [one.token_ids for one in expected],
                "left_behind": sorted(after(before)),
                "shared_memory_bytes": shared_memory_bytes(),
                "own": asdict(Footprint.of(os.getpid())),
            }
        )
        print(number, rows[-1], flush=True)
    return {
        "model": options.model,
        "mode": options.mode,
        "eager": options.eager,
        "engine_alone_leaves": sorted(engine_alone),
        "rows": rows,
    }


def after(before: set[str]) -> set[str]:
    """What is there beyond ``before``, also after some time."""
    ended = time.monotonic()
    while (remains := left() - before) and time.monotonic() < ended + SETTLE_SECONDS:
        time.sleep(0.2)
    return remains


def left() -> set[str]:
    """Files of shared memory, and processes."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    processes = {f"process {number}" for number in numbers if is_process_alive(number)}
    return {str(path) for path in Path("/dev/shm").rglob("*")} | processes


def shared_memory_bytes() -> int:
    """In use, by files with or without a name."""
    about = os.statvfs("/dev/shm")
    return (about.f_blocks - about.f_bfree) * about.f_frsize
