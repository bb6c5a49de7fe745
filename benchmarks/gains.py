"""The picture of gains: times as fast as without balancing, against the busiest rank's load.

    python benchmarks/gains.py

It draws the committed results of layers on an H200 and of prompts on two CPU ranks.
"""

from pathlib import Path
from typing import Any

import harness

from docs.generate.figures import estimate, gpu_rows, read_document, rounds

IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "gains.svg"
SERVED = {  # Okabe and Ito's colours, which colour-blind readers can tell apart
    "vLLM": ("#0072b2", "serving-ttft", "serving-balanced", "real-routing-ttft"),
    "SGLang": ("#d55e00", "sglang-ttft", "sglang-balanced", "real-routing-ttft-sglang"),
}


def paint_layers(axes: Any) -> None:
    """MoE layers with balancing's own time, beside what even work alone would give."""
    for name, colour in (("layer-qwen3", "#0072b2"), ("layer-deepseek", "#009e73")):
        rows = gpu_rows(name)
        points = [(row["imbalance_before"], row["speedup_with_own"]) for row in rows]
        label = f"{rows[0]['what'].removeprefix('layer of ')}, {rows[0]['ranks']} ranks"
        axes.plot(*zip(*points, strict=True), color=colour, marker="D", label=label)
    frame(axes, "MoE layers played on one H200", 3.1)


def paint_prompts(axes: Any) -> None:
    """Time to first token of the shortest prompts, with 95 % intervals."""
    for engine, (colour, *names) in SERVED.items():
        for name in names:
            document = read_document(name)
            row, found = document["rows"][0], document["imbalance"]
            before = found["law"]["before"] if "law" in found else found["before"]["mean"]
            middle, low, high = estimate(rounds(row, "off"))
            style = {"color": colour, "marker": "D" if engine == "vLLM" else "o", "capsize": 3}
            label = f"{engine}, 0.5k to 4k tokens" if name == names[0] else None
            error = [[middle - low], [high - middle]]
            axes.errorbar(before, middle, error, linestyle="", label=label, **style)
    frame(axes, "time to first token, two CPU ranks", 1.8)


def frame(axes: Any, title: str, most: float) -> None:
    """Axes, and what would be gained if all time were that of the busiest rank's experts."""
    axes.plot([1, most], [1, most], color="black", linewidth=0.8, linestyle=":", label="load alone")
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("busiest rank over the mean, before")
    axes.set_ylabel("times as fast")
    axes.legend(frameon=False, fontsize="small", loc="upper left")


if __name__ == "__main__":
    IMAGE.write_bytes(harness.picture(paint_layers, paint_prompts, size=(9.0, 3.4)))
