"""Every layer checked in batches without a fault: no check may find anything.

    python benchmarks/false_alarms.py

Sizes and skews are random, with padding, impossible ids, changes of policy and of speeds, and
weights that are loaded anew; experts are float32, float16 and bfloat16 with weights of 2^-10 to
2^10 times the usual size, and int8 with scales; ranks share their tokens or have their own, in one
domain or two. Exits with 1 if a check, also one at start, found something.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import harness
import torch

from tests.support.ranks import fresh_run_path, run_ranks
from tests.support.sampled_ranks import Traffic, serve_traffic
from ultraep_serve.types import ExpertShape, TokenView, VerificationCheck


def main() -> int:
    """Print a line for each set-up; write them to --json."""
    parser = harness.parser(__doc__, "false_alarms.json")
    parser.add_argument("--batches", type=int, default=400, help="of each of 26 set-ups")
    options = parser.parse_args()
    document: dict[str, Any] = {"batches": 0, "alarms": 0, "results": []}
    for traffic in set_ups(options.batches):
        row = run(traffic)
        print(row, flush=True)
        document["batches"] += row["batches"]
        document["alarms"] += len(row["found"])
        document["results"].append(row)
        harness.write(options.json, document)
    return 1 if document["alarms"] else 0


def set_ups(batches: int) -> Iterator[Traffic]:
    """Each view with each type and scale of weights, every second scale with domains."""
    for view in TokenView:
        yield Traffic(view, ExpertShape(2, 14, 2), torch.int8, batches)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for exponent in (-10, 2):  # of the first of three layers
                shape, factor = ExpertShape(2, 14, 2), 2.0**exponent
                yield Traffic(view, shape, dtype, batches, factor=factor)
            for exponent in (-4, 6):
                shape, factor = ExpertShape(4, 12, 1), 2.0**exponent
                yield Traffic(view, shape, dtype, batches, 2, factor=factor)


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
        "factor": traffic.factor,
        "batches": traffic.batches,
        "verified_layers": {check.name.lower(): verified[check] for check in VerificationCheck},
        "found": sorted(set().union(*(found for _, found in outcomes))),
        "seconds": time.perf_counter() - started,
    }


if __name__ == "__main__":
    sys.exit(main())
