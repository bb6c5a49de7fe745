"""What benchmarks have left in JSON, and how every ratio of the pages is estimated and shown."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultraep_lab.bench.prefill import WITHOUT_EP, median_interval

__all__ = [
    "PATHS",
    "RESULTS",
    "TRAFFIC",
    "estimate",
    "path_rows",
    "percent",
    "percent_of",
    "read_document",
    "read_rows",
    "rest_mark",
    "rounds",
]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
PATHS = "real-routing-path"
TRAFFIC = {"law": "law", "intent": "intent", "switch": "law, then intent"}


def read_document(name: str) -> dict[str, Any]:
    """The JSON file of that name."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def read_rows(name: str) -> list[dict[str, Any]]:
    """Its rows."""
    return list(read_document(name)["rows"])


def rounds(row: dict[str, Any], base: str) -> list[tuple[float, float]]:
    """Times of ``base`` and of ``quota`` at one prompt length."""
    samples = row["ttft_samples"]
    return list(zip(samples[base], samples["quota"], strict=True))


def rest_mark(row: dict[str, Any], base: str) -> str:
    """What stands behind a ratio for which ``base`` was always asked after a rest."""
    is_marked = base == WITHOUT_EP and "ttft_after_rest" not in row
    return r" \*" if is_marked else ""


def path_rows() -> list[dict[str, Any]]:
    """Of all numbers of ranks, each of which has a file."""
    rows = [row for path in RESULTS.glob(f"{PATHS}-*.json") for row in read_rows(path.stem)]
    return sorted(rows, key=lambda row: int(row["ranks"]))


def estimate(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median of the ratios within rounds, and where it lies with 95 % confidence.

    Fewer than six rounds have no interval: then it is the least and the greatest ratio.
    """
    ratios = [one / other for one, other in pairs]
    return statistics.median(ratios), *(median_interval(ratios) or (min(ratios), max(ratios)))


def percent(median: float, low: float, high: float) -> str:
    """Ratios above 1 as "x % more"."""
    shown = (f"{round(100 * (ratio - 1))}" for ratio in (median, low, high))
    return "{} % ({} to {})".format(*shown)


def percent_of(found: dict[str, Any]) -> str:
    """As ``percent`` says it, of a JSON's ratio, whose interval may be missing."""
    return percent(found["median"], *(found["interval"] or (found["min"], found["max"])))
