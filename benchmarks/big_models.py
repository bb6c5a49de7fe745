"""Plans for the loads of three large models, as they were served by others.

    python benchmarks/big_models.py --loads FILE
    python benchmarks/big_models.py                 # draws docs/images/one-layer.svg from the JSON

FILE is JSON, {"loads": {"MODEL layerN": [assignments of each expert]}}: totals of whole runs, as
SyFI-ServingStudio/ServingStudioSim publishes them (presets/alignment/*/expert_popularity.json).
They are not part of this repository. Of every layer, batches are drawn with each rank's assignments
from a multinomial distribution over the totals. Totals are more even than single batches are.

All ranks are in one NVLink domain. "Link" is what the busiest rank sends or receives for one layer,
in experts. The picture has the most uneven of Qwen3-235B's layers on 8 ranks.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host.relays import relay_parents

from ultraep_lab.imbalance import imbalance
from ultraep_lab.workloads import drawn_loads
from ultraep_serve.costs.model import transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota, warm_up
from ultraep_serve.system.files import parse_object, read_text
from ultraep_serve.types import ExpertShape, Plan

IMAGE = Path(__file__).resolve().parents[1] / "docs" / "images" / "one-layer.svg"
PICTURED, PICTURED_LAYERS = "Qwen3-235B-A22B", 94
TOP_K = {"Qwen3-235B-A22B": 8, "GLM-5.2": 8, "DeepSeek-V4-Flash": 6}
TOKENS, BATCHES, SLOTS, SEED = 8192, 4, 2, 1  # tokens of each rank
REPEATS = 9  # of a plan that is timed
RANKS = (8, 16, 32, 64)
Loads = NDArray[np.int64]  # (batches, R, E)


def main() -> None:
    """Plan every layer on every number of ranks, print and write."""
    parser = harness.parser(__doc__, "big-models.json")
    parser.add_argument("--loads", type=Path, help="totals by model and layer")
    args = parser.parse_args()
    if args.loads is None:
        drawn_layer = json.loads(args.json.read_text())["picture"]
        panels = [partial(paint, layer=drawn_layer, after=after) for after in (False, True)]
        IMAGE.write_bytes(harness.picture(*panels, size=(9.0, 3.0)))
        return
    document = parse_object(read_text(args.loads, "loads"), "loads")
    rows = []
    for model, layers in by_model(document["loads"]).items():
        for num_ranks in RANKS:
            rows.append(row_of(model, layers, num_ranks))
            print(json.dumps(rows[-1]), flush=True)
    qwen = by_model(document["loads"])[PICTURED]
    uneven = max(range(len(qwen)), key=lambda number: before(qwen[number], 8))
    harness.write(
        args.json,
        {
            "source": document["about"],
            "tokens_per_rank": TOKENS,
            "batches": BATCHES,
            "slots": SLOTS,
            "seed": SEED,
            "rows": rows,
            "picture": {"layer": uneven, "sampled": len(qwen)} | picture_of(qwen[uneven]),
        },
    )


def by_model(loads: Mapping[str, Sequence[int]]) -> dict[str, list[Loads]]:
    """Totals (E,) of the layers of each model."""
    found: dict[str, list[Loads]] = {}
    for name, totals in loads.items():
        model = next(known for known in TOP_K if re.match(re.escape(known), name))
        found.setdefault(model, []).append(np.array(totals, np.int64))
    return found


def drawn(totals: Loads, num_ranks: int, top_k: int, batches: int, seed: int) -> Loads:
    """Loads (batches, R, E) of batches with ``TOKENS`` of each rank."""
    one_layer = {"layer": totals.tolist()}
    trace = drawn_loads(one_layer, num_ranks, TOKENS * top_k, batches, seed)
    return np.asarray(trace.loads[:, 0], np.int64)


def before(totals: Loads, num_ranks: int) -> float:
    """Imbalance of ``totals`` (E,) with every expert at home."""
    return float(imbalance(totals.reshape(num_ranks, -1).sum(1)))


def row_of(model: str, layers: Sequence[Loads], num_ranks: int) -> dict[str, Any]:
    """All layers and batches of one model on one number of ranks."""
    shape = ExpertShape(num_ranks, layers[0].size, SLOTS)
    context = PlanContext.of(shape)
    warm_up(shape)
    found: dict[str, list[float]] = {}
    for totals in layers:
        for loads in drawn(totals, num_ranks, TOP_K[model], BATCHES, SEED):
            plan, seconds = timed_plan(loads, context)
            found.setdefault("plan_microseconds", []).append(1e6 * seconds)
            found.setdefault("before", []).append(before(loads.sum(0), num_ranks))
            found.setdefault("quota", []).append(float(imbalance(plan.quota.sum(0))))
            for name, value in moved(plan, shape).items():
                found.setdefault(name, []).append(value)
    return {"model": model, "layers": len(layers), "num_ranks": num_ranks} | {
        name: {"min": min(v), "median": float(np.median(v)), "max": max(v)}
        for name, v in found.items()
    }


def timed_plan(loads: Loads, context: PlanContext) -> tuple[Plan, float]:
    """A plan, and the seconds it took: the least of several, since the machine may be busy."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        plan = plan_quota(loads, context, 0)
        seconds.append(time.perf_counter() - start)
    return plan, min(seconds)


def moved(plan: Plan, shape: ExpertShape) -> dict[str, float]:
    """Replicas, and experts on the busiest link without relays and with them."""
    slots, masters = plan.slot_expert, shape.num_masters
    experts = slots[slots >= 0]
    links = {
        mode: transfer_of(slots, masters, relay_parents(slots, masters, mode)).busiest_link
        for mode in ("never", "auto")
    }
    return {
        "replicas": experts.size,
        "most_replicas_of_an_expert": int(np.bincount(experts, minlength=1).max()),
        "link_without_relays": links["never"],
        "link": links["auto"],
    }


def picture_of(totals: Loads) -> dict[str, Any]:
    """One layer of one batch on 8 ranks: what each rank computes at home, and what copies take."""
    (loads,) = drawn(totals, 8, TOP_K[PICTURED], 1, SEED)
    quota = plan_quota(loads, PlanContext.of(ExpertShape(8, totals.size, SLOTS)), 0).quota
    home = np.arange(totals.size) // (totals.size // 8)
    names = "expert", "from", "to", "assignments"
    copies = [
        dict(zip(names, map(int, (expert, home[expert], rank, quota[expert, rank])), strict=True))
        for expert, rank in zip(*np.nonzero(quota), strict=True)
        if home[expert] != rank
    ]
    return {
        "model": PICTURED,
        "layers": PICTURED_LAYERS,
        "before": loads.sum(0).reshape(8, -1).sum(1).tolist(),
        "copies": copies,
    }


COLOURS = ("#e69f00", "#009e73", "#d55e00", "#cc79a7", "#f0e442", "#56b4e9", "#999999", "#000000")


def paint(axes: Any, layer: Mapping[str, Any], after: bool) -> None:
    """The load of each rank in multiples of the mean; an expert that gets a copy has a colour."""
    moved, place = layer["copies"], "to" if after else "from"
    mean = sum(layer["before"]) / len(layer["before"])
    own = np.array(layer["before"], float)
    for copy in moved:
        own[copy["from"]] -= copy["assignments"]
    axes.bar(range(len(own)), own / mean, color="#0072b2", width=0.75)
    experts = sorted({(copy["from"], copy["expert"]) for copy in moved})
    total = own.copy()
    for (_, expert), colour in zip(experts, COLOURS, strict=False):
        label: str | None = f"expert {expert}"
        for copy in moved:
            if copy["expert"] == expert:
                style = {"color": colour, "edgecolor": "#333333", "linewidth": 0.6, "width": 0.75}
                rank, height = copy[place], copy["assignments"] / mean
                axes.bar(rank, height, bottom=total[rank] / mean, label=label, **style)
                total[rank] += copy["assignments"]
                label = None
    axes.axhline(1, color="#333333", linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.6)
    axes.set_xlabel("rank")
    axes.set_xticks(range(len(own)))
    axes.set_ylabel("assignments over the mean")
    when = "after" if after else "before"
    axes.set_title(f"{when}: the busiest rank has {max(total) / mean:.2f}", fontsize="medium")
    if after:
        title = "{model}, layer {layer} of {layers}; copied:".format(**layer)
        style = {"fontsize": "small", "ncols": 4, "columnspacing": 0.8, "handlelength": 1.2}
        axes.legend(frameon=False, title=title, loc="upper center", **style)


if __name__ == "__main__":
    main()
