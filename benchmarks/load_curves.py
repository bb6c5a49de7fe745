"""The picture of vLLM under load: requests/s within the limits of latency, against request rate.

    python benchmarks/load_curves.py

It draws results/load-vllm.json; beside it are AIPerf's own summaries (``-raw``). docs/recipes.md
says how to measure such curves with AIPerf or with vLLM.
"""

import json
from pathlib import Path
from typing import Any

import harness

RESULTS = Path(__file__).resolve().parent / "results"
IMAGE = RESULTS.parents[1] / "docs" / "images" / "goodput.svg"
STYLES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart
    "off": ("#555555", "o"),
    "quota": ("#0072b2", "D"),
    "ideal": ("#009e73", "v"),
}


def paint(axes: Any) -> None:
    """The mean of repeats as a line, every repeat as a point."""
    document = json.loads((RESULTS / "load-vllm.json").read_text())
    axes.set_title("goodput, requests/s", fontsize="medium")
    axes.set_xlabel("requests/s")
    for contender, (colour, marker) in STYLES.items():
        rows = [row for row in document["rows"] if row["contender"] == contender]
        windows = [w for w in document["windows"] if w["contender"] == contender]
        means = [row["goodput_per_second"]["mean"] for row in rows]
        axes.plot([row["rate"] for row in rows], means, color=colour, label=contender)
        points = {"color": colour, "marker": marker, "s": 14, "alpha": 0.6}
        rates, found = ([w[name] for w in windows] for name in ("rate", "goodput_per_second"))
        axes.scatter(rates, found, **points)
    rates = [row["rate"] for row in document["rows"]]
    axes.plot(rates, rates, color="black", linewidth=0.8, linestyle=":", label="as offered")
    axes.legend(frameon=False, fontsize="small")


if __name__ == "__main__":
    IMAGE.write_bytes(harness.picture(paint, size=(6.0, 3.4)))
