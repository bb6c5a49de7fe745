"""Should decode be balanced? How many experts the busiest rank reads in a step, and for how long.

    python benchmarks/decode.py --traces DIR --json benchmarks/results/decode-experts.json

A step has one token of each of many requests. Its tokens are drawn, without replacement, from two
recorded traces of one model, law and intent, whose other sequences are the history that experts
are placed by: every second sequence is history. ``same`` has both texts in history and steps,
``changed`` has law in history and intent in steps. Tokens are dealt to the ranks in turn.

The recording has 64 experts. Layers of models with more are made up of several recorded ones side
by side: each token keeps as many of its experts of each, at random, as make the model's top-k.

In one step of one layer each rank reads the weights of the experts that get a token there, and the
layer waits for the rank that reads most. Choices:

``mean``       of ranks, where one copy of each is read: no choice has fewer
``own``        experts in order, no redundant ones: what this package does in decode
``eplb``       experts placed by EPLB, no redundant ones
and with N redundant experts per rank, placed by EPLB, as ``NAME+N``, N being 1, 2, and ``half`` as
many as a rank holds otherwise:
``vllm``       copies by turns, by vLLM's hash of a token's number in its rank
``random``     copies at random for each token, as SGLang has it
``fixed``      one copy of each expert, chosen with the placement, computes all of its tokens
``metro``      METRO's choice, from what all ranks' tokens chose
``fewest``     the best choice there is
``quota``      no redundant experts but N slots: this package's plan for the step, if it made one

Every figure is the mean over steps, and where 95 % of the steps lie; a step's is the mean over its
layers.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from ultraep_lab.comparators import POLICIES
from ultraep_lab.comparators.eplb import eplb_copies
from ultraep_lab.comparators.metro import (
    fewest_reads,
    fixed_ranks,
    metro_ranks,
    reads_of,
    spread_reads,
)
from ultraep_lab.store import load_trace
from ultraep_lab.trace import Trace
from ultraep_serve.costs.hardware import EXCHANGE_SECONDS, estimate_costs, hardware
from ultraep_serve.costs.shapes import model_shape
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.copies import master_copies
from ultraep_serve.types import ExpertShape, IntArray

Ids = NDArray[np.int64]  # (tokens, layers, K)
Reads = dict[str, list[NDArray[np.number]]]  # by choice, of each layer (R,)

HARDWARE = "h200"
WEIGHT_TYPES = {"deepseek-v2-lite": "bf16", "qwen3-235b-a22b": "bf16", "deepseek-v3": "fp8"}
RECORDED_EXPERTS = 64
ACROSS_HOSTS_SECONDS = 40e-6  # of exchanging counts; 38 to 44 us are reported
REDUNDANT = ("1", "2", "half")  # experts per rank
HASH = 2654435769  # vLLM's: of a token's number, modulo 2**32


def main() -> None:
    """Measure all models, kinds of traffic, ranks and batches; print and write."""
    args = parse_arguments()
    halves = {name: recorded(args.traces / f"{name}.npz") for name in ("law", "intent")}
    traffic = {
        "same": tuple(np.concatenate([halves[name][part] for name in halves]) for part in (0, 1)),
        "changed": (halves["law"][0], halves["intent"][1]),
    }
    rows = []
    for model in args.models:
        for kind, (history, pool) in traffic.items():
            rng = np.random.default_rng(0)
            past, present = widened(history, model, rng), widened(pool, model, rng)
            for num_ranks in args.ranks:
                shape = ExpertShape(num_ranks, model_shape(model).num_experts, 0)
                for tokens in args.tokens:
                    setting = {"model": model, "traffic": kind, "ranks": num_ranks}
                    found = measured(past, present, shape, tokens, args.steps)
                    rows.append({**setting, "tokens": tokens, **found})
                    print_row(rows[-1])
    times = {"within_a_host": EXCHANGE_SECONDS, "across_hosts": ACROSS_HOSTS_SECONDS}
    models = {name: read_times(name) for name in args.models}
    head = {"hardware": HARDWARE, "steps": args.steps, "exchange_seconds": times, "models": models}
    harness.write(args.json, {**head, "rows": rows})


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the two traces")
    parser.add_argument("--models", nargs="+", choices=WEIGHT_TYPES, default=list(WEIGHT_TYPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32])
    batches = [8, 32, 128, 512]
    parser.add_argument("--tokens", type=int, nargs="+", default=batches, help="of all ranks")
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def recorded(path: Path) -> tuple[Ids, Ids]:
    """The tokens of every second sequence, and of the others."""
    trace = load_trace(path, num_experts=RECORDED_EXPERTS)
    assert isinstance(trace, Trace)
    ends = np.cumsum(trace.sequence_lengths)[:-1]
    sequences = np.split(trace.topk_ids.astype(np.int64), ends)
    return np.concatenate(sequences[::2]), np.concatenate(sequences[1::2])


def widened(ids: Ids, model: str, rng: np.random.Generator) -> Ids:
    """Layers with the model's number of experts and top-k, each of several of ``ids``."""
    shape = model_shape(model)
    beside = shape.num_experts // RECORDED_EXPERTS
    tokens, layers, top_k = ids.shape
    kept = shape.experts_per_token // beside
    order = rng.random(ids.shape).argsort(2)[:, :, :kept] if kept < top_k else np.arange(top_k)
    chosen = np.take_along_axis(ids, np.broadcast_to(order, (tokens, layers, kept)), 2)
    used = layers // beside * beside
    numbered = chosen[:, :used] * beside + (np.arange(used) % beside)[:, None]
    return numbered.reshape(tokens, layers // beside, beside * kept)


def read_times(model: str) -> dict[str, Any]:
    """An expert's bytes, and how long the hardware takes to read them."""
    shape, weight_type = model_shape(model), WEIGHT_TYPES[model]
    costs = estimate_costs(shape, hardware(HARDWARE), num_ranks=8, weight_type=weight_type).costs
    return {
        "experts": shape.num_experts,
        "experts_per_token": shape.experts_per_token,
        "weight_type": weight_type,
        "expert_bytes": costs.bytes_per_expert,
        "read_seconds": costs.read_seconds_per_expert,
    }


@dataclass(frozen=True)
class Layer:
    """What is known of one layer before a step."""

    eplb: dict[str, IntArray]  # (E, R) copies, by redundant experts per rank
    fixed: dict[str, IntArray]  # (E,) ranks, by the same


def measured(
    past: Ids, present: Ids, shape: ExpertShape, tokens: int, steps: int
) -> dict[str, Any]:
    """Reads of every choice, and how many fewer METRO has."""
    rng = np.random.default_rng([shape.num_ranks, tokens])
    layers = [placed(past[:, layer], shape, tokens) for layer in range(past.shape[1])]
    most: dict[str, list[float]] = {}
    for _ in range(steps):
        step = present[rng.choice(len(present), tokens, replace=False)]
        for name, reads in read_by(step, layers, shape, rng).items():
            most.setdefault(name, []).append(float(np.mean([each.max() for each in reads])))
    saved = {
        f"{name} - metro+{number}": spread_of(np.subtract(most[name], most[f"metro+{number}"]))
        for number in REDUNDANT
        for name in ("own", "eplb", f"vllm+{number}", f"fixed+{number}")
    }
    return {
        "most": {name: spread_of(values) for name, values in most.items()},
        "saved": saved,
    }


def placed(ids: NDArray[np.int64], shape: ExpertShape, tokens: int) -> Layer:
    """Placements of one layer by its history (tokens, K), for steps of so many ``tokens``."""
    counts = np.bincount(ids.ravel(), minlength=shape.num_logical_experts)
    chance = 1 - (1 - counts / len(ids)) ** tokens
    contexts = {number: context(shape, number) for number in ("0", *REDUNDANT)}
    copies = {number: eplb_copies(counts[None, None], each) for number, each in contexts.items()}
    return Layer(copies, {n: fixed_ranks(chance, each) for n, each in copies.items()})


def context(shape: ExpertShape, number: str) -> PlanContext:
    """So many slots or redundant experts on each rank, all ranks in one domain, equally fast."""
    slots = shape.num_masters // 2 if number == "half" else int(number)
    return PlanContext.of(ExpertShape(shape.num_ranks, shape.num_logical_experts, slots))


def read_by(step: Ids, layers: list[Layer], shape: ExpertShape, rng: np.random.Generator) -> Reads:
    """What each rank reads in one step, by choice."""
    found: Reads = {}
    for number, layer in enumerate(layers):
        for name, reads in choices(step[:, number], layer, shape, rng):
            found.setdefault(name, []).append(reads)
    return found


def choices(
    ids: NDArray[np.int64], layer: Layer, shape: ExpertShape, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.number]]]:
    """Name and reads (R,) of every choice for one layer of one step, whose tokens chose ``ids``."""
    ranks, experts = shape.num_ranks, shape.num_logical_experts
    source = np.arange(len(ids)) % ranks
    hashed = (np.arange(len(ids)) // ranks * HASH % 2**32)[:, None]
    loads = np.zeros((ranks, experts), np.int64)
    np.add.at(loads, (source[:, None], ids), 1)
    active = loads.any(0)
    yield "mean", np.full(ranks, active.sum() / ranks)
    yield "own", reads_of(master_copies(shape).argmax(1).astype(np.int32), active, ranks)
    yield "eplb", reads_of(layer.fixed["0"], active, ranks)
    for number in REDUNDANT:
        copies = layer.eplb[number]
        yield f"vllm+{number}", spread_reads(ids, hashed, copies)
        yield f"random+{number}", spread_reads(ids, rng.integers(1 << 30, size=ids.shape), copies)
        yield f"fixed+{number}", reads_of(layer.fixed[number], active, ranks)
        yield f"metro+{number}", reads_of(metro_ranks(active, copies), active, ranks)
        yield f"fewest+{number}", reads_of(fewest_reads(active, copies), active, ranks)
        plan = POLICIES["quota"].place(loads, context(shape, number), loads[None])
        yield f"quota+{number}", (plan.quota > 0).sum(0)


def spread_of(values: Any) -> list[float]:
    """The mean, and where 95 % of the values lie."""
    low, high = np.percentile(values, (2.5, 97.5))
    return [round(float(value), 3) for value in (np.mean(values), low, high)]


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    setting = f"{row['model']:17}{row['traffic']:8} EP{row['ranks']:<3}{row['tokens']:4} tokens:"
    figures = (f"{name} {figure[0]:.2f}" for name, figure in row["most"].items())
    print(setting, ", ".join(figures), flush=True)


if __name__ == "__main__":
    main()
