"""What benchmarks have left in JSON, and how every ratio of the pages is estimated and shown."""

import io
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultraep_lab.bench.prefill import median_interval

__all__ = [
    "RESULTS",
    "TRAFFIC",
    "estimate",
    "gpu_rows",
    "printed",
    "read_document",
    "read_rows",
    "rounds",
    "times",
]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TRAFFIC = {"law": "law", "intent": "intent", "switch": "law, then intent"}


def read_document(name: str) -> dict[str, Any]:
    """The JSON file of that name."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def read_rows(name: str) -> list[dict[str, Any]]:
    """Its rows."""
    return list(read_document(name)["rows"])


def gpu_rows(*parts: str) -> list[dict[str, Any]]:
    """What was measured on a GPU in these parts."""
    found = read_document("gpu-device")["parts"]
    return [row for part in found if part["part"] in parts for row in part["rows"]]


def printed(view: Any) -> list[str]:
    """Lines of what a command prints on a terminal."""
    from rich.console import Console

    Console(width=80, file=(shown := io.StringIO())).print(view)
    return [line.rstrip() for line in shown.getvalue().splitlines()]


def rounds(row: dict[str, Any], base: str) -> list[tuple[float, float]]:
    """Times of ``base`` and of ``quota`` at one prompt length."""
    samples = row["ttft_samples"]
    return list(zip(samples[base], samples["quota"], strict=True))


def estimate(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median of the ratios within rounds, and where it lies with 95 % confidence.

    Fewer than six rounds have no such interval: then it is the mean of the ratios' logarithms with
    Student's interval.
    """
    ratios = [one / other for one, other in pairs]
    if (interval := median_interval(ratios)) is not None:
        return statistics.median(ratios), *interval
    from scipy.stats import t

    logs = [math.log(ratio) for ratio in ratios]
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def times(median: float, low: float, high: float) -> str:
    """A ratio of times and its interval; "not certain" where that has 1 in it."""
    shown = f"{median:.2f} ({low:.2f}-{high:.2f})"
    return shown if low > 1 or high < 1 else f"{shown}, not certain"
