"""Imbalance and predicted time where copies stay in slots of each layer's own, by kind of traffic.

    python benchmarks/residents.py --loads FILE

FILE is JSON, {"loads": {"MODEL layerN": [assignments of each expert]}}: totals of whole runs, as
SyFI-ServingStudio/ServingStudioSim publishes them; no part of this repository. One layer of each
of two models is served on 8, 16 and 64 ranks with five kinds of traffic: the same all the time;
each expert's share times exp(normal(0, x)), drawn anew for every batch; and two kinds, those loads
and the same shifted by 37 experts, in blocks of eight batches or batch by batch. Of 32 batches the
first eight are not measured. Figures are means over seeds.

``staying`` is the server's planner with all its state, and pays for each copy in the batch that
makes it. ``afresh`` copies anew in every batch, where that pays, as slots that all layers share
make it. ``eplb`` and ``lplb`` place experts anew before every batch by the eight before it, hold as
many replicas, and move them at no cost. Times are those of a layer by the cost model of an H200,
with copies that nothing hides; exchange, plan and reroute are as one took.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from ultraep_lab.comparators import policy_function
from ultraep_lab.machines import HARDWARE, MODELS, estimated_costs
from ultraep_serve.costs.model import CostModel, Transfer, transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.plan.residents import Residents, prices_of
from ultraep_serve.system.files import parse_object, read_text
from ultraep_serve.types import ExpertShape, Plan

LAYERS = (  # as FILE names them, the model whose costs they have, experts of a token
    ("Qwen3-235B-A22B-Thinking-2507-FP8 layer1", "qwen3-235b-a22b", 8),
    ("DeepSeek-V4-Flash-0731 layer2", "deepseek-v3", 6),
)
TRAFFIC = ("the same", "jitter 0.2", "jitter 0.5", "two kinds, blocks of 8", "two kinds, in turn")
TOKENS = (1024, 8192)  # of each rank
BATCHES, SKIPPED, HISTORY, SLOTS = 32, 8, 8, 2
RANKS = (8, 16, 64)
_NOTHING = Transfer(0, 0)
Loads = NDArray[np.int64]


def main() -> None:
    """Serve every layer with every kind of traffic, print and write."""
    parser = harness.parser(__doc__, "residents.json")
    parser.add_argument("--loads", type=Path, required=True, help="totals by model and layer")
    parser.add_argument("--seeds", type=harness.numbers, default=(11, 1, 2, 3, 4, 5))
    args = parser.parse_args()
    totals = parse_object(read_text(args.loads, "loads"), "loads")["loads"]
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for seed in args.seeds:
        for name, loads, costs in cases(totals, seed):
            rows.setdefault(name, []).append(measured(loads, costs))
    words = "layer", "ranks", "tokens", "traffic"
    document = [dict(zip(words, name, strict=True)) | mean_of(row) for name, row in rows.items()]
    print(*map(json.dumps, document), sep="\n")
    harness.write(args.json, {"seeds": args.seeds, "rows": document})


def cases(totals: Any, seed: int) -> Iterator[tuple[tuple[Any, ...], Loads, CostModel]]:
    """Names, loads (batches, R, E) and costs."""
    random = np.random.default_rng(seed)
    for name, model, top_k in LAYERS:
        share = np.array(totals[name]) / sum(totals[name])
        for num_ranks in RANKS:
            costs = estimated_costs(MODELS[model], HARDWARE["h200"], "bf16", num_ranks)
            for tokens in TOKENS:
                for traffic in TRAFFIC:
                    shares = [changed(share, traffic, number, random) for number in range(BATCHES)]
                    drawn = [
                        random.multinomial(tokens * top_k, now / now.sum(), num_ranks)
                        for now in shares
                    ]
                    yield (name, num_ranks, tokens, traffic), np.stack(drawn), costs


def changed(
    share: NDArray[np.float64], traffic: str, number: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """What is chosen in a batch."""
    if traffic.startswith("jitter"):
        return share * np.exp(random.normal(0, float(traffic.split()[1]), share.size))
    block = 8 if traffic.endswith("8") else 1
    is_other = traffic.startswith("two") and number // block % 2 == 1
    return np.roll(share, 37) if is_other else share


def measured(loads: Loads, costs: CostModel) -> dict[str, Any]:
    """Of each policy: mean imbalance, times as fast as off, and copies of a batch."""
    _, num_ranks, num_experts = loads.shape
    context = PlanContext.of(ExpertShape(num_ranks, num_experts, SLOTS))
    masters, prices = context.shape.num_masters, prices_of(costs.integer_costs(), context.shape)
    residents = Residents(context.shape, layer=0)
    history = {name: policy_function(name) for name in ("lplb", "eplb")}
    seconds: dict[str, list[float]] = {}
    imbalance: dict[str, list[float]] = {}
    copies: dict[str, list[int]] = {"staying": [], "afresh": []}

    def took(name: str, busiest: float, extra: float = 0.0, slots: int = SLOTS) -> None:
        read = (masters + slots) * costs.read_seconds_per_expert
        work = max(busiest * costs.seconds_per_assignment, read)
        seconds.setdefault(name, []).append(costs.base_seconds + work + extra)
        imbalance.setdefault(name, []).append(busiest * num_ranks / int(loads[number].sum()))

    def by_plan(name: str, plan: Plan, must: bool) -> None:
        transfer = transfer_of(plan.copied, masters)
        extra = costs.plan_seconds + transfer.busiest_link * costs.seconds_per_sent_expert
        busiest = int(plan.quota.sum(0).max())
        gained = (home - busiest) * costs.seconds_per_assignment - extra
        if must or gained > 0:
            took(name, busiest, costs.exchange_seconds + extra)
        else:
            took(name, home, costs.exchange_seconds)
        copies[name].append(int((plan.copied >= 0).sum()))

    for number, batch in enumerate(loads):
        home = int(context.rank_loads(batch).max())
        staying = residents.plan(batch, context, 0, prices)
        residents.take(staying)
        if number < SKIPPED:
            continue
        took("off", home, slots=0)
        took("ideal", batch.sum() / num_ranks, slots=0)
        by_plan("staying", staying, must=True)
        by_plan("afresh", plan_quota(batch, context, 0), must=False)
        for name, policy in history.items():
            placed = policy(batch, context, loads[number - HISTORY : number])
            extra = costs.exchange_seconds + costs.plan_seconds if name == "lplb" else 0.0
            took(name, int(placed.quota.sum(0).max()), extra)
    off = sum(seconds["off"])
    return {
        "imbalance": {name: float(np.mean(values)) for name, values in imbalance.items()},
        "times_as_fast": {name: off / sum(values) for name, values in seconds.items()},
        "copies": {name: float(np.mean(values)) for name, values in copies.items()},
    }


def mean_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds of every figure."""
    return {
        kind: {name: float(np.mean([row[kind][name] for row in rows])) for name in rows[0][kind]}
        for kind in rows[0]
    }


if __name__ == "__main__":
    main()
