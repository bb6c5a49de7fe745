"""Every layer checked in batches without a fault: no check may find anything.

    python benchmarks/false_alarms.py --json benchmarks/results/false_alarms.json

Sizes and skews are random, with padding, impossible ids, changes of policy and of speeds, and
weights that are loaded anew; experts are float32, bfloat16, and int8 with scales; ranks share their
tokens or have their own, in one domain or two. Then real servers of this environment's engine are
asked: vLLM with two pipeline stages, and either engine on two hosts (namespaces with a link between
them, which needs root). Exits with 1 if a check found something.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import torch

from tests.engines.test_vllm_hosts import data_parallel
from tests.support.namespaces import two_namespaces
from tests.support.ranks import fresh_run_path, run_ranks
from tests.support.sampled_ranks import Traffic, serve_traffic
from tests.support.serving_checks import balance, served, two_hosts
from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under, mixed_prompts
from ultraep_lab.demo.models import make_model
from ultraep_serve.types import ExpertShape, Policy, TokenView, VerificationCheck

_CHECKED = ("--verify-every", "1")


def main() -> int:
    """Print a line for each set-up; write them to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--batches", type=int, default=1250, help="of each of eight set-ups")
    parser.add_argument("--prompts", type=int, default=300, help="of each of two servers")
    options = parser.parse_args()
    document: dict[str, Any] = {"batches": 0, "alarms": 0, "results": [], "servers": []}
    for traffic in set_ups(options.batches) if options.batches else ():
        row = run(traffic)
        print(row, flush=True)
        document["batches"] += row["batches"]
        document["alarms"] += len(row["found"])
        document["results"].append(row)
        harness.write(options.json, document)
    for name, serving in (("pipeline stages", two_stages), ("two hosts", two_hosts_of_two_ranks)):
        with serving() as server:
            row = ask(name, server, options.prompts)
        print(row, flush=True)
        document["alarms"] += row["failures"]
        document["servers"].append(row)
        harness.write(options.json, document)
    return 1 if document["alarms"] else 0


def set_ups(batches: int) -> Iterator[Traffic]:
    """Each view with each type, and with domains."""
    for view in TokenView:
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.int8)):
            yield Traffic(view, ExpertShape(2, 14, 2), dtype, batches, seed=seed)
        yield Traffic(view, ExpertShape(4, 12, 1), torch.bfloat16, batches, 2, seed=3)


def run(traffic: Traffic) -> dict[str, Any]:
    """What was checked in all batches, and what was found."""
    started = time.perf_counter()
    num_ranks = traffic.shape.num_ranks
    with fresh_run_path() as path:
        seconds = 60 + traffic.batches
        outcomes = run_ranks(serve_traffic, num_ranks, path, traffic, timeout_seconds=seconds)
    verified = outcomes[0][0]
    return {
        "view": traffic.view.value,
        "num_ranks": num_ranks,
        "domain_size": traffic.domain_size or num_ranks,
        "dtype": str(traffic.dtype),
        "batches": traffic.batches,
        "verified_layers": {check.name.lower(): verified[check] for check in VerificationCheck},
        "found": sorted(set().union(*(found for _, found in outcomes))),
        "seconds": time.perf_counter() - started,
    }


@contextmanager
def two_stages() -> Iterator[BalancedServer]:
    """Two pipeline stages of two ranks each."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"), tiny_qwen3())
        flags = ("--pipeline-parallel-size", "2", *_CHECKED)
        with served("vllm", model, Path(folder), "tensor", "float32", *flags) as server:
            yield server


@contextmanager
def two_hosts_of_two_ranks() -> Iterator[BalancedServer]:
    """Data parallel over two hosts, each a domain; the one that is asked."""
    with tempfile.TemporaryDirectory() as folder, two_namespaces() as hosts:
        model = make_model(Path(folder, "model"), tiny_qwen3(num_ranks=4))
        shared, second = data_parallel(2, hosts)
        flags = [*shared, *_CHECKED]
        with two_hosts("vllm", model, Path(folder), hosts, flags, second) as servers:
            yield servers[0]


def ask(name: str, server: BalancedServer, prompts: int) -> dict[str, Any]:
    """What was checked while prompts of mixed lengths were answered, four at a time."""
    started = time.perf_counter()
    answers = generate_under(server, Policy.QUOTA, mixed_prompts(prompts))
    time.sleep(2)  # the next heartbeat
    found = balance(server)
    return {
        "server": name,
        "prompts": len(answers),
        "ranks": found["num_ranks"],
        "verified_layers": found["verification"]["by_check"],
        "failures": found["verification"]["failures"],
        "switched_off": found["verification"]["switched_off"],
        "seconds": time.perf_counter() - started,
    }


if __name__ == "__main__":
    sys.exit(main())
