"""The eight workloads that Megatron-LM#7488 proposes for comparing balancers, planned.

    python benchmarks/named_workloads.py

16 ranks, 128 experts, 8 distinct ones of each token, 1,024 tokens of each rank, 16 batches. A hot
expert is chosen eight times as often as another. ``quota`` has two slots per rank. ``eplb`` has two
redundant experts per rank in every layer, and places experts by the batch before. Beside them
stands a bound that no plan with such slots can pass: a rank computes at most what its own experts
and the most popular others in its slots get.
"""

from collections.abc import Callable, Mapping
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from ultraep_lab.comparators import policy_function
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import ExpertShape, imbalance

RANKS, EXPERTS, TOP_K, TOKENS, SLOTS, BATCHES, HEAT = 16, 128, 8, 1024, 2, 16, 8.0
MASTERS = EXPERTS // RANKS
BURST = range(5, 7)  # the batches of the burst
Weights = NDArray[np.float64]  # (E,)
Loads = NDArray[np.int64]  # (R, E)


def main() -> None:
    """Draw and plan every workload, print and write."""
    parser = harness.parser(__doc__, "named-workloads.json")
    args = parser.parse_args()
    rows = [row_of(name, made) for name, made in WORKLOADS.items()]
    sizes = {"num_ranks": RANKS, "num_experts": EXPERTS, "top_k": TOP_K, "slots": SLOTS}
    harness.write(args.json, {**sizes, "tokens_per_rank": TOKENS, "seed": 1, "rows": rows})


def row_of(name: str, made: Callable[[int], tuple[Weights, Loads]]) -> dict[str, Any]:
    """Largest imbalance of all batches, by policy."""
    context = PlanContext.of(ExpertShape(RANKS, EXPERTS, SLOTS))
    rng, past = np.random.default_rng(1), np.zeros((0, RANKS, EXPERTS), np.int64)
    worst = dict.fromkeys(("off", "quota", "eplb", "bound"), 0.0)
    for number in range(-1, BATCHES):  # the first one is history only
        weights, tokens = made(number)
        loads = exact(tokens) if name == "W0 balanced" else drawn(weights, tokens, rng)
        for policy in ("off", "quota", "eplb") if len(past) else ():
            placed = policy_function(policy)(loads, context, past)
            worst[policy] = max(worst[policy], float(imbalance(placed.quota.sum(0))))
        worst["bound"] = max(worst["bound"], bound(loads.sum(0)))
        past = loads[None]
    print(name, worst, flush=True)
    return {"name": name, **worst}


def drawn(weights: Weights, tokens: Loads, rng: np.random.Generator) -> Loads:
    """Loads (R, E) of ``tokens`` (R,): K distinct experts each, by exponential clocks."""
    rows = []
    for count in tokens.tolist():
        rings = rng.standard_exponential((count, EXPERTS)) / weights
        chosen = np.argpartition(rings, TOP_K - 1, axis=1)[:, :TOP_K]
        rows.append(np.bincount(chosen.ravel(), minlength=EXPERTS))
    return np.stack(rows)


def exact(tokens: Loads) -> Loads:
    """Loads (R, E) that are the same for every expert."""
    return np.repeat(tokens[:, None] * TOP_K // EXPERTS, EXPERTS, axis=1)


def bound(load: Loads) -> float:
    """The least imbalance that any plan can reach for the experts' ``load`` (E,)."""
    home = np.arange(EXPERTS) // MASTERS
    room = np.array(
        [load[home == r].sum() + np.sort(load[home != r])[-SLOTS:].sum() for r in range(RANKS)]
    )
    low, high = -(-int(load.sum()) // RANKS), int(load.sum())
    while low < high:  # the smallest load of the busiest rank for which there is room
        middle = (low + high) // 2
        low, high = (
            (low, middle) if np.minimum(room, middle).sum() >= load.sum() else (middle + 1, high)
        )
    return float(low * RANKS / load.sum())


def hot(*experts: int) -> Weights:
    """Weights with these experts hot."""
    weights = np.ones(EXPERTS)
    weights[list(experts)] = HEAT
    return weights


EVEN, ALIKE = np.ones(EXPERTS), np.full(RANKS, TOKENS)
SCATTERED = np.random.default_rng(7).choice(EXPERTS, MASTERS, replace=False).tolist()
SPREAD = range(0, EXPERTS, 2 * MASTERS)  # one on every second rank: as many as a rank has
RAGGED = np.where(np.arange(RANKS) % 4 == 0, 13 * TOKENS // 4, TOKENS // 4)  # the same in all
ABSENT = np.where(np.arange(EXPERTS) < EXPERTS // 2, 1.0, 1e-9)  # the last eight ranks' experts


def hot_rank(rank: int) -> Weights:
    """Weights with all experts of one rank hot."""
    return hot(*range(rank * MASTERS, (rank + 1) * MASTERS))


WORKLOADS: Mapping[str, Callable[[int], tuple[Weights, Loads]]] = {
    "W0 balanced": lambda _: (EVEN, ALIKE),
    "W1 hot experts": lambda _: (hot(*SCATTERED), ALIKE),
    "W2 hot rank": lambda _: (hot_rank(3), ALIKE),
    "W3 the same heat, spread": lambda _: (hot(*SPREAD), ALIKE),
    "W4 ragged sources": lambda _: (hot(*SCATTERED), RAGGED),
    "W5 experts and ranks without load": lambda _: (ABSENT, ALIKE),
    "W6 moving hot rank": lambda number: (hot_rank(number % RANKS), ALIKE),
    "W7 burst": lambda number: (hot_rank(3) if number in BURST else EVEN, ALIKE),
}


if __name__ == "__main__":
    main()
