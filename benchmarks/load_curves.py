"""Draws latency and goodput against request rate, as they were measured, into docs/images.

    python benchmarks/load_curves.py

The figures are results/load-vllm.json and results/load-sglang.json, and beside them AIPerf's own
summaries (``-raw``). docs/recipes.md says how to measure such curves with AIPerf or with vLLM.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ultraep_lab.pictures import picture

RESULTS = Path(__file__).resolve().parent / "results"
IMAGES = RESULTS.parents[1] / "docs" / "images"
STYLES = {  # Okabe and Ito's colours, which colour-blind readers can tell apart
    "off": ("#555555", "o", "off"),
    "quota": ("#0072b2", "D", "quota"),
    "ideal": ("#009e73", "v", "ideal"),
    "sglang-eplb": ("#d55e00", "^", "SGLang's EPLB"),
}
PANELS = {
    "ttft_mean_seconds": "mean time to first token, s",
    "ttft_p50_seconds": "P50 of time to first token, s",
    "ttft_p99_seconds": "P99 of time to first token, s",
    "itl_p99_seconds": "P99 of inter-token latency, s",
    "goodput_per_second": "goodput, requests/s",
}


def main() -> None:
    """Draw both engines' curves, and vLLM's goodput alone."""
    for name in ("load-vllm", "load-sglang"):
        document = json.loads((RESULTS / f"{name}.json").read_text())
        panels = [partial(panel, document=document, name=figure) for figure in PANELS]
        drawn = picture(*panels, file_type="svg", size=(11.0, 6.5), columns=3)
        (IMAGES / f"{name}.svg").write_bytes(drawn)
    vllm = json.loads((RESULTS / "load-vllm.json").read_text())
    alone = partial(panel, document=vllm, name="goodput_per_second")
    (IMAGES / "goodput.svg").write_bytes(picture(alone, file_type="svg", size=(6.0, 3.4)))


def panel(axes: Any, document: Mapping[str, Any], name: str) -> None:
    """One figure: the mean of repeats as a line, every repeat as a point."""
    axes.set_title(PANELS[name], fontsize="medium")
    axes.set_xlabel("requests/s")
    for contender, (colour, marker, label) in STYLES.items():
        rows = [row for row in document["rows"] if row["contender"] == contender]
        windows = [w for w in document["windows"] if w["contender"] == contender]
        if rows:
            means = [row[name]["mean"] for row in rows]
            axes.plot([row["rate"] for row in rows], means, color=colour, label=label)
        points = {"color": colour, "marker": marker, "s": 14, "alpha": 0.6}
        axes.scatter([w["rate"] for w in windows], [w[name] for w in windows], **points)
    if name.endswith("_seconds"):
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")  # 0.2 instead of 2 x 10^-1
        axes.minorticks_off()
    else:
        rates = [row["rate"] for row in document["rows"]]
        axes.plot(rates, rates, color="black", linewidth=0.8, linestyle=":", label="as offered")
        axes.legend(frameon=False, fontsize="small")


if __name__ == "__main__":
    main()
