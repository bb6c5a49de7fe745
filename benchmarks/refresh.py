"""How long may a plan be kept? Imbalance and predicted time against the refresh interval.

    python benchmarks/refresh.py --traces DIR

Traffic is drawn, with replacement, from the sequences of two recorded traces of one model, law and
intent: law alone, law and then intent, both in turn every five batches. A batch is as many whole
sequences as it takes to fill it, dealt to the ranks in turn. All policies see the same batches;
those before the first measured one are history only. ``eplb`` and ``lplb`` place experts anew
every N batches, by as many batches as the interval has, at least 8. Imbalance is max/mean of
assignments over ranks, the mean over layers and batches.

Times are those of a MoE layer as the cost model has them for the hardware, with the same
proportions in batches of 4096 tokens per rank. ``quota`` moves weights only where that pays;
``quota-every-N`` moves them in each Nth batch; what ``eplb`` and ``lplb`` move costs nothing here.
"""

from collections.abc import Iterator
from dataclasses import replace
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

MODEL, GPU, TIMED_TOKENS = "deepseek-v2-lite", "h200", 4096  # per rank
INTERVALS = (1, 8, 64)
HISTORY_ONLY, MEASURED, SWITCH = 64, 96, 36  # batches; SWITCH counts from the first measured one
LAYERS = tuple(range(0, 26, 5))
NUM_EXPERTS, TOP_K, SLOTS = 64, 6, 2
TRAFFIC = {
    "stationary": lambda batch: "law",
    "domain switch": lambda batch: "law" if batch < HISTORY_ONLY + SWITCH else "intent",
    "in turn": lambda batch: ("law", "intent")[batch // 5 % 2],
}


def main() -> None:
    """Measure every kind of traffic on every number of ranks, print and write."""
    parser = harness.parser(__doc__, "refresh.json")
    parser.add_argument("--traces", type=Path, required=True, help="directory of the two traces")
    parser.add_argument("--ranks", type=harness.numbers, default=(8, 16))
    parser.add_argument("--batch-tokens", type=int, default=8192)
    args = parser.parse_args()
    pools = {name: pool(args.traces / f"{name}.npz") for name in ("law", "intent")}
    rows = []
    for num_ranks in args.ranks:
        for kind, source in TRAFFIC.items():
            rng = np.random.default_rng(0)
            drawn = [
                draw(pools[source(number)], args.batch_tokens, num_ranks, rng)
                for number in range(HISTORY_ONLY + MEASURED)
            ]
            for row in measured(LoadTrace(np.stack(drawn)), num_ranks):
                rows.append({"traffic": kind, "ep": num_ranks, **row})
                print(rows[-1], flush=True)
    sizes = {"batch_tokens": args.batch_tokens, "slots": SLOTS, "layers": LAYERS}
    batches = {"history_only": HISTORY_ONLY, "measured": MEASURED, "switch_at": SWITCH}
    times = {"model": MODEL, "hardware": GPU, "timed_tokens_per_rank": TIMED_TOKENS}
    harness.write(args.json, {**sizes, **batches, **times, "policies": rows})


def pool(path: Path) -> NDArray[np.int64]:
    """Loads (sequences, layers, E) of a trace's sequences."""
    trace = load_trace(path, num_experts=NUM_EXPERTS)
    assert isinstance(trace, Trace)
    ends = np.cumsum(trace.sequence_lengths)[:-1]
    return np.stack(
        [
            [np.bincount(ids[:, layer].ravel(), minlength=NUM_EXPERTS) for layer in LAYERS]
            for ids in np.split(trace.topk_ids, ends)
        ]
    )


def draw(
    sequences: NDArray[np.int64], batch_tokens: int, num_ranks: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Loads (layers, R, E) of one batch."""
    loads = np.zeros((len(LAYERS), num_ranks, NUM_EXPERTS), np.int64)
    tokens, count = 0, 0
    while tokens < batch_tokens:
        chosen = sequences[rng.integers(len(sequences))]
        loads[:, count % num_ranks] += chosen
        tokens += int(chosen[0].sum()) // TOP_K
        count += 1
    return loads


def measured(trace: LoadTrace, num_ranks: int) -> Iterator[dict[str, Any]]:
    """A row for every policy and interval."""
    for name in ("off", "quota", *(f"quota-every-{n}" for n in INTERVALS[1:]), "llep"):
        interval = 0 if name == "off" else int(name.rpartition("-")[2] if "-" in name else 1)
        yield row_of(name, replayed(trace, num_ranks, name, 1), interval)
    for name in ("eplb", "lplb"):
        for interval in INTERVALS:
            yield row_of(name, replayed(trace, num_ranks, name, interval), interval)


def replayed(trace: LoadTrace, num_ranks: int, policy: str, interval: int) -> Replay:
    """``policy`` after ``HISTORY_ONLY`` batches."""
    options = ReplayOptions(
        num_ranks=num_ranks,
        num_slots=SLOTS,
        history_batches=max(8, interval),
        rebalance_every=interval,
        skip=HISTORY_ONLY,
    )
    return replay(trace, options, [policy_function(policy)])


def row_of(name: str, result: Replay, interval: int) -> dict[str, Any]:
    """Mean imbalance and time of a layer."""
    (found,) = result.policies.values()
    return {
        "policy": "quota" if name.startswith("quota") else name,
        "interval": interval,
        "imbalance": float(np.mean(found.imbalance_after)),
        "imbalance_p99": float(np.percentile(found.imbalance_after, 99)),
        "layer_seconds": layer_seconds(name, result, interval),
    }


def layer_seconds(name: str, result: Replay, interval: int) -> float:
    """The mean over layers and batches, by the cost model."""
    (found,) = result.policies.values()
    costs = estimated_costs(MODELS[MODEL], HARDWARE[GPU], "bf16")
    masters, mean = result.context.shape.num_masters, TIMED_TOKENS * TOP_K
    if name == "quota":
        timed = [mean * result.context.shape.num_ranks] * len(result.cases)
        return judge(replace(result, assignments=timed), found, costs).on_seconds
    times = []
    for (batch, _), after, moved in zip(
        result.cases, found.imbalance_after, found.transfers, strict=True
    ):
        held = masters + (SLOTS if name in ("eplb", "lplb") else moved.busiest_receiver)
        work = costs.seconds_per_assignment * after * mean
        seconds = costs.base_seconds + max(work, costs.read_seconds_per_expert * held)
        if name not in ("off", "eplb", "lplb") and batch % interval == 0:
            moving = moved.busiest_link * costs.seconds_per_sent_expert
            seconds += costs.exchange_seconds + costs.plan_seconds + moving
        times.append(seconds)
    return float(np.mean(times))


if __name__ == "__main__":
    main()
