"""What to expect of large models' MoE layers: imbalance and predicted time, by policy and traffic.

    python benchmarks/residents.py --loads FILE

FILE is JSON, {"loads": {"MODEL layerN": [assignments of each expert]}}: totals of whole runs, as
SyFI-ServingStudio/ServingStudioSim publishes them (presets/alignment/*/expert_popularity.json).
They are not part of this repository. All layers are served by 8, 16 and 64 H200s in hosts of 8,
which copies do not leave, and by 64 GPUs of a GB200 rack, in batches of 256 to 8,192 tokens of each
rank, with four kinds of traffic:

- the same: each batch is drawn from the totals;
- jitter 0.5: each expert's share times exp(normal(0, 0.5)), anew in every batch;
- two kinds, blocks of 8: those loads and the same shifted by 37 experts, in blocks of eight
  batches;
- a change: what is measured is shifted by 37 experts, what came before it is not.

Of 32 batches the first eight are not measured. Times are sums over layers, batches and seeds.

``staying`` is the server's planner with all its state, and pays for each copy in the batch that
makes it. ``afresh`` copies anew in every batch, where that pays, as slots that all layers share
make it. A plan that makes copies beside those that stay is charged by how much longer it is.
``eplb`` and ``lplb`` place experts anew before every batch by the eight before it;
``eplb-deployed`` and ``lplb-deployed`` once, by the 1,000 batches before the first measured one, as
where vLLM's window of 1,000 steps has been rearranged within the last 3,000. All of them hold as
many replicas, anywhere in the group, and move them at no cost. They are measured in batches of
8,192 tokens on 8 H200s and on the rack.

Times are those of layers by the lab's cost model of the GPUs, as for ``replay --hardware``, with
copies that nothing hides. It counts dispatch and combine at NVLink's speed, also between hosts:
what the busiest rank sends or, where all ranks gather all tokens and reduce all sums, as they do
for vLLM's ``allgather_reducescatter``, the same of every batch however even ranks are.
``pays_from`` is the smallest batch of steady traffic, in tokens of all ranks, from which on a
memory of slots makes layers 1.02 times as fast; below ``smallest`` a server with these costs
leaves batches alone.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from ultraep_lab.comparators import policy_function
from ultraep_lab.machines import HARDWARE, MODELS, estimated_costs
from ultraep_lab.verdict import LEAST_GAIN
from ultraep_serve.config import LEAST_BATCH_TOKENS
from ultraep_serve.costs.model import NEW_COPIES, CostModel, fewest_assignments, transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.plan.residents import Residents, prices_of
from ultraep_serve.system.files import parse_object, read_text
from ultraep_serve.types import ExpertShape, Plan

SERVED = {  # as names in FILE begin: the model whose sizes they have, and the type of its experts
    "Qwen3-235B-A22B": ("qwen3-235b-a22b", "bf16"),
    "GLM-5.2": ("glm-5", "fp8"),
    "DeepSeek-V4-Flash": ("deepseek-v4-flash", "fp8"),
}
GROUPS = ((8, "h200"), (16, "h200"), (64, "h200"), (64, "gb200"))
GATHERED = (((8, "h200"), True),)  # with a dispatch that gathers all tokens, too
TRAFFIC = ("the same", "jitter 0.5", "two kinds, blocks of 8", "a change")
TOKENS = (256, 1024, 8192)  # of each rank
COMPARED = ((8, "h200", 8192), (64, "gb200", 8192))  # where the others place experts too
SIZES = tuple(1 << power for power in range(3, 15))  # where pays_from is looked for
# Of a plan that looks for copies beside those that stay: instructions of its longest warp by those
# of a fresh plan (plan-lengths.json), by ranks at most.
LOOKING = ((8, 1.6), (16, 1.6), (64, 3.9))
BATCHES, SKIPPED, HISTORY, SLOTS, WINDOW = 32, 8, 8, 2, 1000
PER_LAYER, SHARED = "staying", "afresh"
Loads = NDArray[np.int64]


@dataclass(frozen=True)
class Served:
    """One model on one group of ranks."""

    model: str
    num_ranks: int
    hardware: str
    is_gathered: bool  # whether all ranks gather all tokens
    tokens: int = 0  # of each rank

    @property
    def costs(self) -> CostModel:
        name, weights = SERVED[self.model]
        sizes, hardware = MODELS[name], HARDWARE[self.hardware]
        costs = estimated_costs(sizes, hardware, weights, self.num_ranks)
        if not self.is_gathered:
            return costs
        near = estimated_costs(sizes, replace(hardware, link_bytes_per_second=1e18), weights, 1)
        sent = costs.seconds_per_assignment - near.seconds_per_assignment
        return replace(
            costs,
            seconds_per_assignment=near.seconds_per_assignment,
            base_seconds=costs.base_seconds + sent * self.tokens * (self.num_ranks - 1),
        )

    @property
    def top_k(self) -> int:
        return MODELS[SERVED[self.model][0]].experts_per_token

    def context(self, num_experts: int) -> PlanContext:
        """Copies stay in the domains of the hardware."""
        size = HARDWARE[self.hardware].domain_size
        shape = ExpertShape(self.num_ranks, num_experts, SLOTS)
        return PlanContext.of(shape, size if size < self.num_ranks else None)


@dataclass
class Found:
    """Of each policy, over all layers, batches and seeds."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    imbalance: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def times_as_fast(self, name: str) -> float:
        return self.seconds["off"] / self.seconds[name]

    def to_json(self) -> dict[str, Any]:
        before = self.imbalance["off"]
        return {
            "imbalance": {name: float(np.mean(all_)) for name, all_ in self.imbalance.items()},
            "before": {"min": min(before), "max": max(before)},
            "times_as_fast": {name: self.times_as_fast(name) for name in self.seconds},
            "copies": {name: float(np.mean(all_)) for name, all_ in self.copies.items()},
        }


def main() -> None:
    """Serve every model on every group with every kind of traffic, print and write."""
    parser = harness.parser(__doc__, "residents.json")
    parser.add_argument("--loads", type=Path, required=True, help="totals by model and layer")
    parser.add_argument("--seeds", type=harness.numbers, default=(11, 1))
    args = parser.parse_args()
    document = parse_object(read_text(args.loads, "loads"), "loads")
    rows, pays = [], []
    for model, (_, weights) in SERVED.items():
        totals = [
            np.array(of_layer) for name, of_layer in document["loads"].items()
            if re.match(re.escape(model), name)
        ]  # fmt: skip
        for group, is_gathered in [*((group, False) for group in GROUPS), *GATHERED]:
            named = {"model": model, "weights": weights, "ranks": group[0], "hardware": group[1]}
            named |= {"gathered": is_gathered}
            served = Served(model, *group, is_gathered)
            least = {"tokens": pays_from(served, totals), "smallest": smallest_batch(served)}
            pays.append(named | least)
            print(json.dumps(pays[-1]), flush=True)
            for tokens in TOKENS:
                served = Served(model, *group, is_gathered, tokens)
                is_compared = (*group, tokens) in COMPARED and not is_gathered
                for traffic in TRAFFIC[:1] if is_gathered else TRAFFIC:
                    found = Found()
                    for loads, drawn in cases(served, traffic, totals, args.seeds):
                        measure(served, loads, found, drawn if is_compared else None)
                    case = {"tokens": tokens, "traffic": traffic, "layers": len(totals)}
                    rows.append(named | case | found.to_json())
                    print(json.dumps(rows[-1]), flush=True)
    about = {"source": document["about"], "seeds": args.seeds, "slots": SLOTS}
    harness.write(args.json, {**about, "rows": rows, "pays_from": pays})


@dataclass(frozen=True)
class Drawn:
    """What batches of one layer are drawn from."""

    share: NDArray[np.float64]  # of each expert
    traffic: str
    assignments: int  # of one rank
    random: np.random.Generator

    def loads(self, number: int, num_ranks: int) -> Loads:
        """Those (R, E) of batch ``number``."""
        now = changed(self.share, self.traffic, number, self.random)
        return self.random.multinomial(self.assignments, now, num_ranks)

    def window(self, num_ranks: int) -> Loads:
        """The sum (E,) of the batches before the first measured one."""
        of_all = self.assignments * num_ranks
        numbers = range(SKIPPED - WINDOW, SKIPPED)
        shares = (changed(self.share, self.traffic, number, self.random) for number in numbers)
        drawn: Loads = np.sum([self.random.multinomial(of_all, share) for share in shares], axis=0)
        return drawn


def cases(
    served: Served, traffic: str, totals: list[Loads], seeds: tuple[int, ...]
) -> Iterator[tuple[Loads, Drawn]]:
    """Of each layer and seed: loads (batches, R, E), and what they are drawn from."""
    for layer, of_run in enumerate(totals):
        for seed in seeds:
            random = np.random.default_rng((seed, layer))
            drawn = Drawn(of_run / of_run.sum(), traffic, served.tokens * served.top_k, random)
            yield np.stack([drawn.loads(n, served.num_ranks) for n in range(BATCHES)]), drawn


def changed(
    share: NDArray[np.float64], traffic: str, number: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """The shares of experts in batch ``number``; what is measured begins at ``SKIPPED``."""
    if traffic.startswith("jitter"):
        now = share * np.exp(random.normal(0, float(traffic.split()[1]), share.size))
        return np.asarray(now / now.sum())
    is_other = number >= SKIPPED if traffic == "a change" else bool(number // 8 % 2)
    return share if traffic == "the same" or not is_other else np.roll(share, 37)


def measure(served: Served, loads: Loads, found: Found, past: Drawn | None = None) -> None:
    """One layer; the others place experts where what was drawn before is known."""
    _, num_ranks, num_experts = loads.shape
    context, costs = served.context(num_experts), served.costs
    masters, prices = context.shape.num_masters, prices_of(costs.integer_costs(), context.shape)
    residents = Residents(context.shape, layer=0)
    long_ago = np.zeros((1, num_ranks, num_experts), np.int64)
    if past is not None:
        long_ago[0, 0] = past.window(num_ranks)

    def took(name: str, busiest: float, extra: float = 0.0, slots: int = SLOTS) -> None:
        read = (masters + slots) * costs.read_seconds_per_expert
        work = max(busiest * costs.seconds_per_assignment, read)
        found.seconds[name] += costs.base_seconds + work + extra
        found.imbalance[name].append(busiest * num_ranks / int(batch.sum()))

    looking = next(times for most, times in LOOKING if num_ranks <= most)

    def by_plan(name: str, plan: Plan, must: bool) -> None:
        transfer = transfer_of(plan.copied, masters)
        plans = looking if name == PER_LAYER and transfer.busiest_link else 1
        extra = plans * costs.plan_seconds + transfer.busiest_link * costs.seconds_per_sent_expert
        busiest = int(plan.quota.sum(0).max())
        gained = (home - busiest) * costs.seconds_per_assignment - extra
        is_followed = must or gained > 0
        if is_followed:
            took(name, busiest, costs.exchange_seconds + extra)
        else:
            took(name, home, costs.exchange_seconds)
        found.copies[name].append(int((plan.copied >= 0).sum()) if is_followed else 0)

    for number, batch in enumerate(loads):
        home = int(context.rank_loads(batch).max())
        staying = residents.plan(batch, context, 0, prices)
        residents.take(staying)
        if number < SKIPPED:
            continue
        took("off", home, slots=0)
        by_plan(PER_LAYER, staying, must=True)
        by_plan(SHARED, plan_quota(batch, context, 0), must=False)
        took("ideal", batch.sum() / num_ranks, slots=0)
        for name in ("eplb", "lplb") if past is not None else ():
            extra = costs.exchange_seconds + costs.plan_seconds if name == "lplb" else 0.0
            known = {name: loads[number - HISTORY : number], f"{name}-deployed": long_ago}
            for kind, history in known.items():
                placed = policy_function(name)(batch, context, history)
                took(kind, int(placed.quota.sum(0).max()), extra)


def smallest_batch(served: Served) -> dict[str, int]:
    """Tokens of all ranks, below which a server with these costs leaves batches alone."""
    experts = MODELS[SERVED[served.model][0]].num_experts
    shape = ExpertShape(served.num_ranks, experts, SLOTS)
    found = {}
    for name, copies in ((PER_LAYER, 0), (SHARED, NEW_COPIES)):
        fewest = fewest_assignments(served.costs.integer_costs(), shape, copies, None)
        found[name] = max(LEAST_BATCH_TOKENS, -(-fewest // served.top_k))
    return found


def pays_from(served: Served, totals: list[Loads]) -> dict[str, int | None]:
    """Tokens of all ranks, by memory of slots; None: in no size up to the largest."""
    enough: dict[str, int | None] = {PER_LAYER: None, SHARED: None}
    for tokens in reversed(SIZES):
        found, served = Found(), replace(served, tokens=tokens)
        for loads, _ in cases(served, "the same", totals, (1,)):
            measure(served, loads, found)
        gains = {name: found.times_as_fast(name) >= LEAST_GAIN for name in enough}
        for name, does_pay in gains.items():
            is_next = enough[name] in (None, 2 * tokens * served.num_ranks)
            if does_pay and is_next:
                enough[name] = tokens * served.num_ranks
        if not any(gains.values()):
            break
    return enough


if __name__ == "__main__":
    main()
