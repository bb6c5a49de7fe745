"""Imbalance and predicted time of every policy on recorded routing, in all layers of a model.

    python benchmarks/predicted.py --traces DIR

Traffic is drawn, with replacement, from the sequences of two recorded traces of one model, law and
intent: law alone; both in turn every five batches; and a change, from law to intent, after which
figures begin. A batch is as many whole sequences as it takes to fill it, dealt to the ranks in
turn. All policies see the same batches; those before the first measured one are history only.
Imbalance is max/mean of assignments over ranks, the mean over layers and batches.

``eplb`` and ``lplb`` place experts before every batch by the eight before it; ``eplb-deployed`` and
``lplb-deployed`` once, by the 1,000 before the first measured one, as where vLLM's window of 1,000
steps was rearranged within the last 3,000. What they move costs nothing here.

Times are those of a MoE layer as the cost model has them for the hardware, at these batches.
``quota`` and ``staying`` move weights only where that pays.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from ultraep_lab.comparators import policy_function
from ultraep_lab.machines import HARDWARE, MODELS, estimated_costs
from ultraep_lab.replay import Replay, replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.store import load_trace
from ultraep_lab.trace import LoadTrace, Trace
from ultraep_lab.verdict import judge
from ultraep_serve.costs.model import CostModel

MODEL, GPU, WEIGHTS, TOKENS = "deepseek-v2-lite", "h200", "bf16", 4096  # of each rank
RANKS, POLICIES = 8, ("off", "staying", "quota", "llep", "eplb", "lplb")
HISTORY_ONLY, MEASURED = 1000, 50  # batches
DEPLOYED = {"history_batches": 1000, "rebalance_every": 3000}  # as vLLM's defaults
NUM_EXPERTS, TOP_K, SLOTS = 64, 6, 2
TRAFFIC: dict[str, Callable[[int], str]] = {
    "stationary": lambda batch: "law",
    "in turn": lambda batch: ("law", "intent")[batch // 5 % 2],
    "a change": lambda batch: "law" if batch < HISTORY_ONLY else "intent",
}


def main() -> None:
    """Measure both kinds of traffic, print and write."""
    parser = harness.parser(__doc__, "predicted.json")
    parser.add_argument("--traces", type=Path, required=True, help="directory of the two traces")
    args = parser.parse_args()
    pools = {name: pool(args.traces / f"{name}.npz") for name in ("law", "intent")}
    rows = []
    for kind, source in TRAFFIC.items():
        rng = np.random.default_rng(0)
        numbers = range(HISTORY_ONLY + MEASURED)
        trace = LoadTrace(np.stack([draw(pools[source(number)], rng) for number in numbers]))
        for name in POLICIES:
            rows.append({"traffic": kind, **measured(trace, name)})
            print(rows[-1], flush=True)
            if name in ("eplb", "lplb"):
                found = measured(trace, name, **DEPLOYED)
                rows.append({"traffic": kind, **found, "policy": f"{name}-deployed"})
                print(rows[-1], flush=True)
    sizes = {"ranks": RANKS, "tokens_per_rank": TOKENS, "slots": SLOTS}
    batches = {"layers": trace.num_layers, "history_only": HISTORY_ONLY, "measured": MEASURED}
    times = {"model": MODEL, "hardware": GPU, "weights": WEIGHTS}
    harness.write(args.json, {**sizes, **batches, **times, "policies": rows})


def pool(path: Path) -> NDArray[np.int64]:
    """Loads (sequences, layers, E) of a trace's sequences."""
    trace = load_trace(path, num_experts=NUM_EXPERTS)
    assert isinstance(trace, Trace)
    ends = np.cumsum(trace.sequence_lengths)[:-1]
    return np.stack(
        [
            [np.bincount(layer.ravel(), minlength=NUM_EXPERTS) for layer in ids.swapaxes(0, 1)]
            for ids in np.split(trace.topk_ids, ends)
        ]
    )


def draw(sequences: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Loads (layers, R, E) of one batch."""
    loads = np.zeros((sequences.shape[1], RANKS, NUM_EXPERTS), np.int64)
    tokens, count = 0, 0
    while tokens < TOKENS * RANKS:
        chosen = sequences[rng.integers(len(sequences))]
        loads[:, count % RANKS] += chosen
        tokens += int(chosen[0].sum()) // TOP_K
        count += 1
    return loads


def measured(trace: LoadTrace, policy: str, **history: Any) -> dict[str, Any]:
    """Mean imbalance and time of a layer, after ``HISTORY_ONLY`` batches."""
    options = ReplayOptions(num_ranks=RANKS, num_slots=SLOTS, skip=HISTORY_ONLY, **history)
    costs = estimated_costs(MODELS[MODEL], HARDWARE[GPU], WEIGHTS, RANKS)
    result = replay(trace, options, [policy_function(policy)], costs.integer_costs())
    (found,) = result.policies.values()
    if policy in ("quota", "staying"):
        seconds = judge(result, policy, costs).on_seconds
    else:
        seconds = layer_seconds(policy, result, costs)
    return {
        "policy": policy,
        "imbalance": float(np.mean(found.imbalance_after)),
        "imbalance_p99": float(np.percentile(found.imbalance_after, 99)),
        "copies": float(np.mean(found.copies)),
        "layer_seconds": seconds,
    }


def layer_seconds(policy: str, result: Replay, costs: CostModel) -> float:
    """The mean over layers and batches, by the cost model."""
    (found,), times = result.policies.values(), []
    for case, moved in enumerate(found.transfers):
        extra = SLOTS if policy in ("eplb", "lplb") else moved.busiest_receiver
        busiest = found.imbalance_after[case] * result.assignments[case] / RANKS
        read = (result.context.shape.num_masters + extra) * costs.read_seconds_per_expert
        seconds = costs.base_seconds + max(busiest * costs.seconds_per_assignment, read)
        if policy in ("llep", "lplb"):
            moving = moved.busiest_link * costs.seconds_per_sent_expert
            seconds += costs.exchange_seconds + costs.plan_seconds + moving
        times.append(seconds)
    return float(np.mean(times))


if __name__ == "__main__":
    main()
