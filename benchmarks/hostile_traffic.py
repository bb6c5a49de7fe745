"""What hostile traffic takes from servers: clients that ask the sidecar, and a flood of UDP.

    python benchmarks/hostile_traffic.py clients
    python benchmarks/hostile_traffic.py udp

Portions with and without an attack take turns over one running server, with the same prompts in
both. Both cores are the ranks', so attackers run when nothing else wants a core (SCHED_IDLE): what
they compute themselves is not charged to the server. A flood takes memory's bandwidth and caches
even so: while the server is serving, the same flood goes to a socket of nobody's in portions
without an attack. While the server is idle attackers have all cores, portions without are quiet,
and the server's CPU time is what the attack takes; the kernel's part of it (softirq) is counted as
well, though on loopback it runs in the attacker's time.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import httpx
from attackers import ask, flood
from served import WORK, model, serve

from tests.support.namespaces import on_host, two_namespaces
from tests.support.serving_checks import HostServer, two_hosts
from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import ratios_json
from ultraep_lab.bench.prompts import Openings, fitted_prompt
from ultraep_lab.demo.models import served_type
from ultraep_lab.demo.text import sample_text
from ultraep_serve.system.machine import free_port

FORK = multiprocessing.get_context("fork")
SETTLE_SECONDS, IDLE_PORTIONS = 1.0, 6
WORDS = {True: "attacked", False: "quiet"}
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Use:
    """CPU seconds so far."""

    sidecars: float
    others: float  # of all other threads of the server but the busiest of each rank
    all_threads: float
    softirq: float  # of the machine


@dataclass(frozen=True)
class Portion:
    """A part of a run."""

    ttft: list[float]
    seconds: float
    sent: int
    attacker: float  # CPU seconds
    used: dict[str, float]  # CPU seconds, as in Use
    probes: list[float]  # seconds until the sidecar has said that all is well


@dataclass(frozen=True)
class Target:
    """A server under attack."""

    server: Server
    prompts: list[str]
    roots: list[int]  # first processes
    attack: Callable[[Any, Any], None]
    control: Callable[[Any, Any], None] | None  # what the attacker does in portions without
    probe: Callable[[], None]  # raises where all is not well


def _threads(roots: list[int]) -> Iterator[tuple[int, str, list[float]]]:
    """Process, command line and CPU seconds of each thread, of all that ``roots`` started."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    left = list(roots)
    while left:
        process = left.pop()
        left += children.get(process, [])
        with suppress(OSError):
            tasks = list(Path(f"/proc/{process}/task").iterdir())
            command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
            yield process, command, [_seconds(task) for task in tasks]


def _seconds(task: Path) -> float:
    with suppress(OSError):
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    return 0.0


def use(roots: list[int]) -> Use:
    """CPU time until now."""
    sidecars = others = everything = 0.0
    for _, command, threads in _threads(roots):
        everything += sum(threads)
        if "ultraep_serve.sidecar" in command:
            sidecars += sum(threads)
        else:
            others += sum(threads) - max(threads, default=0.0)
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return Use(sidecars, others, everything, int(fields[7]) / TICK)


@contextmanager
def attacking(attack: Callable[[Any, Any], None] | None) -> Iterator[dict[str, float]]:
    """What the attacker did meanwhile, filled in at the end."""
    stop, count = FORK.Event(), FORK.Value("q", 0)
    found = {"sent": 0.0, "attacker": 0.0}

    def run() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        assert attack is not None
        attack(stop, count)

    process = FORK.Process(target=run) if attack else None
    if process:
        process.start()
    time.sleep(SETTLE_SECONDS)
    own = Path(f"/proc/{process.pid}") if process else Path()
    before, used = count.value, _seconds(own)
    try:
        yield found
    finally:
        found["sent"], found["attacker"] = count.value - before, _seconds(own) - used
        if process:
            stop.set()
            process.join(10)
            process.kill()


def portion(target: Target, under_attack: bool, seconds: float, *, serving: bool) -> Portion:
    """Prompts one after the other, or none, with or without the attack."""
    times: list[float] = []
    probes: list[float] = []
    control = target.control if serving else None
    with attacking(target.attack if under_attack else control) as found:
        began, before = time.monotonic(), use(target.roots)
        while time.monotonic() - began < seconds or len(times) % len(target.prompts):
            if serving:
                prompt = target.prompts[len(times) % len(target.prompts)]
                times.append(target.server.first_token(prompt).seconds)
            else:
                time.sleep(0.5)
            asked = time.monotonic()
            target.probe()
            probes.append(time.monotonic() - asked)
        took, after = time.monotonic() - began, use(target.roots)
    used = {name: getattr(after, name) - getattr(before, name) for name in Use.__annotations__}
    return Portion(times, took, int(found["sent"]), found["attacker"], used, probes)


def compared(name: str, target: Target, options: argparse.Namespace, serving: bool) -> Any:
    """Portions in turns, first without, then with, then the other way round."""
    pairs: list[dict[bool, Portion]] = []
    portions = options.portions if serving else IDLE_PORTIONS
    for number in range(portions):
        order = (False, True) if number % 2 else (True, False)
        seconds = options.seconds / portions
        pairs.append({each: portion(target, each, seconds, serving=serving) for each in order})
        print(f"{name}, pair {number}: {shares(pairs[-1])}", flush=True)
    result: dict[str, Any] = {
        "seconds_of_attack": sum(pair[True].seconds for pair in pairs),
        "sent_per_second": statistics.median(p[True].sent / p[True].seconds for p in pairs),
        "attackers_cores": statistics.median(p[True].attacker / p[True].seconds for p in pairs),
        "share_of_two_cores": {
            key: statistics.median(shares(pair)[key] for pair in pairs) for key in shares(pairs[0])
        },
    }
    for each, word in WORDS.items():
        probes = [seconds for pair in pairs for seconds in pair[each].probes]
        result[f"probes_{word}"] = {"median": statistics.median(probes), "max": max(probes)}
    if serving:
        ratios = [
            statistics.median(pair[True].ttft) / statistics.median(pair[False].ttft)
            for pair in pairs
        ]
        result["ttft_ratio"] = ratios_json(ratios)
        for each, word in WORDS.items():
            result[f"ttft_{word}"] = [time for pair in pairs for time in pair[each].ttft]
    print(name, {key: value for key, value in result.items() if "ttft_" not in key[:5]})
    print(name, result.get("ttft_ratio"))
    return result


def shares(pair: dict[bool, Portion]) -> dict[str, float]:
    """CPU time under attack beyond that without, as a share of both cores."""
    return {
        key: round(
            (
                pair[True].used[key] / pair[True].seconds
                - pair[False].used[key] / pair[False].seconds
            )
            / 2,
            5,
        )
        for key in Use.__annotations__
    }


def prompts_for(server: Server, options: argparse.Namespace) -> list[str]:
    """Texts of one length that differ from their first word on."""
    openings, length = Openings(), options.prompt_tokens
    return [
        fitted_prompt(
            openings, lambda n, s: sample_text("law", n, s), length, seed, server.count_tokens
        )
        for seed in range(options.prompts)
    ]


def probe(url: str) -> None:
    """The sidecar says that all is well, or an error is raised."""
    httpx.get(f"{url}/readyz", timeout=30.0).raise_for_status()


def clients(options: argparse.Namespace) -> dict[str, Any]:
    """Hostile GET requests at the sidecar of a server of two ranks."""
    with (
        serve(options, model("qwen3"), served_type()) as running,
        closing(Server(running.url)) as server,
    ):
        address = ("127.0.0.1", running.sidecar_port)
        target = Target(
            server,
            prompts_for(server, options),
            [running.process_id],
            lambda stop, count: ask(address, stop, count),
            None,  # they compute next to nothing themselves
            lambda: probe(running.sidecar_url),
        )
        return both(target, options)


def both(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """While serving, and idle."""
    for prompt in 2 * target.prompts:  # warm
        target.server.first_token(prompt)
    serving = compared("serving", target, options, serving=True)
    return {"serving": serving, "idle": compared("idle", target, options, serving=False)}


def udp(options: argparse.Namespace) -> dict[str, Any]:
    """A flood at the first rank of one of two hosts, each of one rank, from that host itself."""
    with two_namespaces() as hosts:
        shared = [
            *("--enable-expert-parallel", "--no-enable-prefix-caching", "--enforce-eager"),
            *("--max-model-len", "16384", "--dtype", served_type()),
            *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
            *("--data-parallel-address", hosts.addresses[0]),
            *("--data-parallel-rpc-port", str(free_port())),
        ]
        second = ["--headless", "--data-parallel-start-rank", "1"]
        WORK.mkdir(exist_ok=True)
        with two_hosts("vllm", model("qwen3"), WORK, hosts, shared, second) as servers:
            first = servers[0]
            address = (hosts.addresses[0], udp_port(hosts.names[0], hosts.addresses[0]))
            with (
                closing(Server(first.url)) as server,
                socket.socket(type=socket.SOCK_DGRAM) as sink,
            ):
                sink.bind((hosts.addresses[0], 0))
                target = Target(
                    server,
                    prompts_for(server, options),
                    [each.process_id for each in servers],
                    lambda stop, count: flood(hosts.names[0], address, stop, count),
                    lambda stop, count: flood(hosts.names[0], sink.getsockname(), stop, count),
                    lambda: probe_both(servers),
                )
                return both(target, options)


def probe_both(servers: Iterable[HostServer]) -> None:
    """Of both hosts, each asked from its own network."""
    for server in servers:
        with on_host(server.hosts, server.host):
            probe(server.sidecar_url)


def udp_port(network: str, address: str) -> int:
    """The port of the only UDP socket on ``address`` there."""
    own = socket.inet_aton(address)[::-1].hex().upper()
    with open("/proc/thread-self/net/udp") as file:
        ports = [int(line.split()[1][9:], 16) for line in file if line.split()[1][:8] == own]
    assert len(ports) == 1, (network, ports)
    return ports[0]


def main() -> None:
    """One attack; the other's figures stay in the file."""
    parser = harness.parser(__doc__ or "", "hostile-traffic.json")
    parser.add_argument("attack", choices=("clients", "udp"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of attack, serving and idle")
    parser.add_argument("--portions", type=int, default=24, help="while serving")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args()
    options.mode, options.engine, options.eager = "tensor", "vllm", True
    found = clients(options) if options.attack == "clients" else udp(options)
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    commands = {**known.get("commands", {}), options.attack: harness.command()}
    others = {name: known[name] for name in ("clients", "udp") if name in known}
    harness.write(options.json, {**others, options.attack: found, "commands": commands})


if __name__ == "__main__":
    main()
