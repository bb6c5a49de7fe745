"""What samples in service cost: every layer of a server's prefill checked, by the ranks' clocks.

    python benchmarks/verification.py

From the share of the time that checking every layer takes follows that of other values of
``--verify-every``. Exits with 1 if a check found something.
"""

import sys
import time
from contextlib import closing
from typing import Any

import harness
import numpy as np
from served import add_server_flags, model, serve

from ultraep_lab.bench.engine import Server
from ultraep_lab.demo.balanced_server import BalancedServer, installed_engine
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.telemetry.run_files import RunFiles

PROMPT_TOKENS = 2048
PORTION = 8  # prompts of one ratio
HEARTBEAT_SECONDS = 1.5


def main() -> int:
    """Serve, ask, print what was found, write it to --json."""
    parser = harness.parser(__doc__, "verification.json")
    add_server_flags(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--prompts", type=int, default=80)
    options = parser.parse_args()
    with serve(options, model(options.model), options.dtype, "--verify-every", "1") as running:
        found = measured(running, options.prompts)
    document = {"engine": installed_engine(), "dtype": options.dtype, **found}
    print(document)
    harness.write(options.json, document)
    return 1 if found["failures"] else 0


def measured(running: BalancedServer, prompts: int) -> dict[str, Any]:
    """Time of samples over time of prefill, in portions, whose spread gives the interval."""
    ratios, before = [], headers(running)
    with Server(running.url) as server:
        for start in range(-PORTION, prompts, PORTION):
            began = time.perf_counter_ns()
            for number in range(start, start + PORTION):
                domain = DOMAINS[number % len(DOMAINS)]
                server.first_token(sample_text(domain, PROMPT_TOKENS, 500 + number))
            elapsed, after = time.perf_counter_ns() - began, headers(running)
            if start >= 0:  # the first portion warms up
                pairs = zip(before, after, strict=True)
                spent = max(b.verification_ns - a.verification_ns for a, b in pairs)
                ratios.append(spent / elapsed)
            before = after
    half = 1.96 * np.std(ratios, ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    mean = float(np.mean(ratios))
    return {
        "prompts": prompts,
        "verified_layers": before[0].verified_layers,
        "verification_over_prefill": {"mean": mean, "low": mean - half, "high": mean + half},
        "failures": sum(sum(header.verification_failures) for header in before),
    }


def headers(running: BalancedServer) -> list[RingHeader]:
    """What both ranks have counted, after their next heartbeat."""
    time.sleep(HEARTBEAT_SECONDS)
    found = []
    for rank in range(2):
        with closing(RingReader(RunFiles(running.run_path).ring(rank))) as ring:
            found.append(ring.header())
    return found


if __name__ == "__main__":
    sys.exit(main())
