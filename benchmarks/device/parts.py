"""What there is to run, the most important first; and one part, in the process started for it.

parts.py NAME ROWS        ROWS: the file where each result is appended as a line of JSON
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """A function ``run(bench, report, *arguments)``, named ``module.function``."""

    name: str
    run: str
    seconds: float  # it may take on a GPU, compilation included
    arguments: tuple[str | int | float, ...] = ()


CHECKS_OF_KERNELS = (
    "count_reroute",
    "plan",
    "relays",
    "residents",
    "rows",
    "setup",
    "stream",
)
CHECKS_OF_BALANCERS = ("balancer", "samples")
PARTS = (
    Part("routing", "stages.routing", 180),
    Part("layer-qwen3", "layer.run", 120, ("qwen3-235b-a22b", 16)),
    Part("stream", "stages.streaming", 90),
    Part("layer-deepseek", "layer.run", 150, ("deepseek-v3", 64)),
    Part("layer-demo", "layer.run", 60, ("ultraep-demo", 8)),
    Part("layer-sheet", "layer.run", 90, ("qwen3-235b-a22b", 8, 1.0, 2.0, 4.0, 7.0)),
    Part("balancer", "balancer.run", 90),
    Part("exchange", "stages.exchanging", 60),
    Part("processes", "memory.processes", 150),
    Part("slots", "memory.slots", 60),
    Part("checks", "checks.run", 160, CHECKS_OF_KERNELS),
    Part("checks-of-balancers", "checks.run", 160, CHECKS_OF_BALANCERS),
)


def main() -> None:
    """Run the part; exits with 1 if a check failed."""
    import _checkout  # noqa: F401
    from report import Report

    from tests.support.bench import Bench

    name, rows = sys.argv[1:]
    part = next(part for part in PARTS if part.name == name)
    report = Report(Path(rows))
    module, function = part.run.split(".")
    getattr(importlib.import_module(module), function)(Bench(), report, *part.arguments)
    sys.exit(not report.all_passed)


if __name__ == "__main__":
    main()
