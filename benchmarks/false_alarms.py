"""Every layer checked in batches without a fault: no check may find anything.

    python benchmarks/false_alarms.py

Sizes and skews are random, with padding, impossible ids, changes of policy and weights that are
loaded anew; experts are float32, float16 and bfloat16 with weights of 2^-10 to
2^10 times the usual size, and int8 with scales; ranks share their tokens or have their own, in one
domain or two. Exits with 1 if a check, also one at start, found something.
"""

import itertools
import sys
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
    rows, alarms = list[dict[str, Any]](), 0
    for traffic in set_ups(options.batches):
        rows.append(run(traffic))
        print(rows[-1], flush=True)
        alarms += len(rows[-1]["found"])
        batches = sum(row["batches"] for row in rows)
        harness.write(options.json, {"batches": batches, "alarms": alarms, "results": rows})
    return min(alarms, 1)


def set_ups(batches: int) -> Iterator[Traffic]:
    """Each view with each type and scale of weights, every second scale with domains."""
    two, four = ExpertShape(2, 14, 2), ExpertShape(4, 12, 1)
    for view, dtype in itertools.product(TokenView, (torch.float32, torch.float16, torch.bfloat16)):
        for seed, (shape, size) in enumerate(((two, 0), (four, 2), (two, 0), (four, 2))):
            factor = 2.0 ** (-10, -4, 2, 6)[seed]  # of the first of three layers
            yield Traffic(view, shape, dtype, batches, size, seed, factor)
    yield from (Traffic(view, two, torch.int8, batches) for view in TokenView)


def run(traffic: Traffic) -> dict[str, Any]:
    """What was checked in all batches, and what was found."""
    num_ranks, seconds = traffic.shape.num_ranks, 60 + traffic.batches
    with fresh_run_path() as path:
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
    }


if __name__ == "__main__":
    sys.exit(main())
