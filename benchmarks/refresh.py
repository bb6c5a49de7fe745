"""How long may a plan be kept? Imbalance and predicted time against the refresh interval.

    python benchmarks/refresh.py --traces DIR --json benchmarks/results/refresh.json --plot SVG

Traffic is drawn, with replacement, from the sequences of two recorded traces of one model, law and
intent: law alone, law and then intent, both in turn every five batches. A batch is as many whole
sequences as it takes to fill it, dealt to the ranks in turn. All policies see the same batches;
those before the first measured one are history only. ``eplb`` and ``lplb`` place experts anew
every N batches, by as many batches as the interval has, at least 8. Imbalance is max/mean of
assignments over ranks, the mean over layers and batches.

Times are those of the MoE layers as the cost model has them for the hardware, with the same
proportions in batches of 4096 tokens per rank. ``quota`` moves weights only where that pays;
``quota-every-N`` moves them in each Nth batch; what ``eplb`` and ``lplb`` move costs nothing here.

Waterfill moves the shared expert, which belongs to no trace: in its table the shared expert of
every token counts as one assignment more, under all policies.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from ultraep_lab.advise.predict import NOTHING_MOVED, layer_seconds
from ultraep_lab.comparators import POLICIES, policy_function
from ultraep_lab.comparators.waterfill import waterfill
from ultraep_lab.pictures import picture
from ultraep_lab.replay import Replay, replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.store import load_trace
from ultraep_lab.trace import LoadTrace, Trace
from ultraep_serve.costs.hardware import estimate_costs, hardware
from ultraep_serve.costs.model import saved_picoseconds, transfer_of
from ultraep_serve.costs.shapes import model_shape
from ultraep_serve.types import ExpertShape, imbalance

MODEL, HARDWARE, TIMED_TOKENS = "deepseek-v2-lite", "h200", 4096  # per rank
INTERVALS = (1, 8, 64)
HISTORY_ONLY, MEASURED, SWITCH = 64, 96, 36  # batches; SWITCH counts from the first measured one
LAYERS = tuple(range(0, 26, 5))
NUM_EXPERTS, TOP_K, SLOTS = 64, 6, 2
TRAFFIC = {
    "stationary": lambda batch: "law",
    "domain switch": lambda batch: "law" if batch < HISTORY_ONLY + SWITCH else "intent",
    "in turn": lambda batch: ("law", "intent")[batch // 5 % 2],
}
COLOURS = {"quota": "#0072b2", "eplb": "#d55e00", "lplb": "#009e73"}


def main() -> None:
    """Measure every kind of traffic on every number of ranks, print, write and draw."""
    args = parse_arguments()
    pools = {name: pool(args.traces / f"{name}.npz") for name in ("law", "intent")}
    rows, shared = [], []
    for num_ranks in args.ranks:
        for kind, source in TRAFFIC.items():
            rng = np.random.default_rng(0)
            drawn = [
                draw(pools[source(number)], args.batch_tokens, num_ranks, rng)
                for number in range(HISTORY_ONLY + MEASURED)
            ]
            trace = LoadTrace(np.stack(drawn))
            for row in measured(trace, num_ranks):
                rows.append({"traffic": kind, "ep": num_ranks, **row})
                print_row(rows[-1])
            shared.append({"traffic": kind, "ep": num_ranks, **with_shared(trace)})
            print(shared[-1])
    sizes = {"batch_tokens": args.batch_tokens, "slots": SLOTS, "layers": LAYERS}
    batches = {"history_only": HISTORY_ONLY, "measured": MEASURED, "switch_at": SWITCH}
    times = {"model": MODEL, "hardware": HARDWARE, "timed_tokens_per_rank": TIMED_TOKENS}
    harness.write(
        args.json, {**sizes, **batches, **times, "policies": rows, "with_shared_expert": shared}
    )
    if args.plot is not None:
        args.plot.write_bytes(drawing(rows))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the two traces")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--plot", type=Path, help="draw the imbalances into this SVG")
    return parser.parse_args()


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
    """``policy`` after ``HISTORY_ONLY`` batches; with plans where it has slots."""
    options = ReplayOptions(
        num_ranks=num_ranks,
        num_slots=SLOTS,
        history_batches=max(8, interval),
        rebalance_every=interval,
        skip=HISTORY_ONLY,
    )
    chosen = policy_function(policy)
    return replay(trace, options, [chosen], keep_plans=chosen.has_slots)


def row_of(name: str, result: Replay, interval: int) -> dict[str, Any]:
    """Mean imbalance and time of a layer."""
    (found,) = result.policies.values()
    after = np.reshape(found.imbalance_after, (-1, len(LAYERS)))
    return {
        "policy": "quota" if name.startswith("quota") else name,
        "interval": interval,
        "imbalance": float(after.mean()),
        "imbalance_p99": float(np.percentile(after, 99)),
        "layer_seconds": float(np.mean(list(seconds(name, result, interval)))),
    }


def seconds(name: str, result: Replay, interval: int) -> Iterator[float]:
    """The time of each layer of each batch by the cost model."""
    shape, ranks = model_shape(MODEL), result.context.shape.num_ranks
    costs = estimate_costs(
        shape,
        hardware(HARDWARE),
        num_ranks=ranks,
        weight_type="bf16",
        context_tokens=1024,
        domain_size=ranks,
    ).costs
    (found,) = result.policies.values()
    masters, mean = result.context.shape.num_masters, TIMED_TOKENS * TOP_K
    for index, (batch, _) in enumerate(result.cases):
        busiest = found.imbalance_after[index] * mean
        transfer, exchanged, held = NOTHING_MOVED, False, masters
        if name in ("eplb", "lplb"):
            held += SLOTS
        elif name != "off" and result.plans is not None:
            exchanged = batch % interval == 0
            moved = transfer_of(result.plans.slot_expert[index], masters)
            held += moved.busiest_receiver
            transfer = moved if exchanged else NOTHING_MOVED
            before = result.imbalance_before[index] * mean
            whole = ExpertShape(ranks, NUM_EXPERTS, max(SLOTS, moved.busiest_receiver))
            saved = saved_picoseconds(
                round(before), round(busiest), whole, moved, costs.integer_costs()
            )
            if name == "quota" and saved <= 0:
                busiest, transfer, held = before, NOTHING_MOVED, masters
        yield layer_seconds(
            costs, busiest, TIMED_TOKENS, held, transfer=transfer, exchanged=exchanged
        )


def with_shared(trace: LoadTrace) -> dict[str, float]:
    """Mean imbalances where each token has a shared expert, with and without Waterfill."""
    found: dict[str, list[float]] = {}
    num_ranks = trace.loads.shape[2]
    context = replayed(trace, num_ranks, "off", 1).context
    for number in range(HISTORY_ONLY, HISTORY_ONLY + MEASURED):
        start = number // 64 * 64
        for layer, loads in enumerate(trace.loads[number].astype(np.int64)):
            history = trace.loads[start - 64 : start, layer].astype(np.int64)
            tokens = loads.sum(1) // TOP_K
            for name in ("off", "eplb", "quota"):
                shares = POLICIES[name](loads, context, history).shares
                assert shares is not None
                routed = shares.sum(1, dtype=np.int64)
                by_name = {name: np.diag(tokens)}
                if name != "quota":
                    by_name[f"{name}, waterfill"] = waterfill(routed, tokens)
                for key, shared in by_name.items():
                    found.setdefault(key, []).append(imbalance((routed + shared).sum(0)))
    return {name: float(np.mean(values)) for name, values in found.items()}


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    print(
        f"{row['traffic']:14} EP{row['ep']:<3} {row['policy']:6} every {row['interval']:<3}"
        f"{row['imbalance']:8.3f} p99 {row['imbalance_p99']:.3f}"
        f"{row['layer_seconds'] * 1e6:9.0f} us",
        flush=True,
    )


def drawing(rows: list[dict[str, Any]]) -> bytes:
    """An SVG: imbalance against interval, one plot for each kind of traffic, of the most ranks."""
    ranks = max(row["ep"] for row in rows)

    def paint(axes: Any, kind: str) -> None:
        chosen = [row for row in rows if row["traffic"] == kind and row["ep"] == ranks]
        (off,) = (row["imbalance"] for row in chosen if row["policy"] == "off")
        axes.axhline(off, color="#555555", linestyle=":", label="off")
        for name, colour in COLOURS.items():
            points = [(r["interval"], r["imbalance"]) for r in chosen if r["policy"] == name]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(INTERVALS, [str(number) for number in INTERVALS])
        axes.set_ylim(0.97, 1.03 * max(row["imbalance"] for row in rows if row["ep"] == ranks))
        axes.set_title(kind)
        axes.set_xlabel("batches between refreshes")
        if kind == next(iter(TRAFFIC)):
            axes.set_ylabel(f"busiest rank / mean, {ranks} ranks")
            axes.legend(frameon=False)

    paints = [lambda axes, kind=kind: paint(axes, kind) for kind in TRAFFIC]
    return picture(*paints, file_type="svg", size=(10.5, 3.6), columns=len(paints))


if __name__ == "__main__":
    main()
