"""A server under load, off against quota, by the engine's own load generator.

    python benchmarks/under_load.py

Two ranks serve a model with skewed routing. ``vllm bench serve`` or SGLang's ``bench_serving``
sends two kinds of traffic, each in runs that alternate between policies:

agents  a closed loop of 4 clients; all requests of a run share a prefix of 2,000 tokens, which is
        new in each run, and each has 100 tokens of its own
open    requests that arrive at a rate, with prompts of 1,024 tokens in the median

vLLM's needs pandas, SGLang's datasets (``pip install``).
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Any

import harness
from served import WORK, add_server_flags, model, serve

from ultraep_lab.bench.prefill import balanced_orders
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import BalancedServer, installed_engine
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.types import Policy

PREFIX, TURN, CLIENTS = 2000, 100, 4
MEDIAN, SIGMA, LONGEST = 1024, 0.54, 8192  # lognormal: nine in ten below 2,048 tokens
NEW_TOKENS = 16
POLICIES = (Policy.OFF, Policy.QUOTA)
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # as its console script, which does not start in builds for CPUs
FIGURES = ("completed", "request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")


def main() -> None:
    """Serve, put it under load, and write this engine's part of the JSON."""
    parser = harness.parser(__doc__, "under-load.json")
    add_server_flags(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--rates", type=harness.numbers, default=(), help="requests/s")
    parser.add_argument("--requests", type=int, default=80, help="of each run")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    engine, texts = installed_engine(), Texts()
    rows = []
    with (
        serve(options, model(options.model), options.dtype, prefix_cache=True) as running,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        send_load(running, engine, texts.agents(CLIENTS * 4), closed_loop())
        for rate in (None, *options.rates):
            for repeat in range(options.repeats):
                orders = balanced_orders(POLICIES)
                for policy in orders[repeat % len(orders)]:
                    sidecar.set_policy(policy)
                    prompts = (texts.agents if rate is None else texts.alone)(options.requests)
                    flags = closed_loop() if rate is None else ("--request-rate", str(rate))
                    found = send_load(running, engine, prompts, flags)
                    assert found["completed"] == options.requests, "every request is answered"
                    row = {"rate": rate, "repeat": repeat, "policy": policy.value, **found}
                    print(row, flush=True)
                    rows.append(row)
    whole = json.loads(options.json.read_text()) if options.json.exists() else {}
    traffic = {
        "agents": {"clients": CLIENTS, "shared_tokens": PREFIX, "own_tokens": TURN},
        "open": {"median_tokens": MEDIAN, "sigma": SIGMA, "longest": LONGEST},
        "new_tokens": NEW_TOKENS,
        "requests": options.requests,
    }
    how = {"command": harness.command(), "model": options.model, "dtype": options.dtype}
    mine = {**how, "traffic": traffic, "rows": rows}
    harness.write(options.json, {**whole, engine: mine})


class Texts:
    """Prompts, none of which begins like one of an earlier run."""

    def __init__(self) -> None:
        self._seeds: Iterator[int] = count()
        self._chooser = random.Random(0)

    def agents(self, number: int) -> list[str]:
        """A prefix that all share, and tokens of each one's own."""
        prefix = self._text(PREFIX)
        return [f"{prefix} {self._text(TURN)}" for _ in range(number)]

    def alone(self, number: int) -> list[str]:
        """Prompts of different lengths that share nothing."""
        lengths = [MEDIAN * self._chooser.lognormvariate(0, SIGMA) for _ in range(number)]
        return [self._text(min(round(length), LONGEST)) for length in lengths]

    def _text(self, tokens: int) -> str:
        return sample_text(DOMAINS[0], tokens, next(self._seeds))


def closed_loop() -> tuple[str, ...]:
    """Flags of both load generators: each client asks as soon as it is answered."""
    return "--request-rate", "inf", "--max-concurrency", str(CLIENTS)


def send_load(
    running: BalancedServer, engine: str, prompts: Sequence[str], flags: Sequence[str]
) -> dict[str, Any]:
    """What the engine's load generator says of one run."""
    asked, found = WORK / "asked.jsonl", WORK / "found.json"
    found.unlink(missing_ok=True)
    if engine == "vllm":
        lines = [{"prompt": prompt} for prompt in prompts]
        command = [sys.executable, "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--ignore-eos"]
        command += ["--temperature", "0", "--disable-shuffle", "--skip-chat-template"]
        command += ["--custom-output-len", str(NEW_TOKENS)]
        command += ["--save-result", "--result-filename", str(found)]
    else:
        answer = {"content": "answer"}  # the data set's, never read
        lines = [{"conversations": [{"content": prompt}, answer]} for prompt in prompts]
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        command += ["--sharegpt-output-len", str(NEW_TOKENS), "--warmup-requests", "0"]
        command += ["--output-file", str(found)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command += ["--model", running.model, "--base-url", running.url, "--disable-tqdm"]
    command += ["--dataset-name", "custom", "--dataset-path", str(asked)]
    command += ["--num-prompts", str(len(prompts)), *flags]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError(told.stderr[-3000:])
    whole = json.loads(found.read_text())
    return {name: whole[name] for name in FIGURES}


if __name__ == "__main__":
    main()
