"""A simulated MoE layer: what every rank of a group computes, off, balanced, and perfectly even.

The ranks are virtual and share the GPU, so they compute one after another, each timed apart; the
layer takes as long as its slowest rank. Weights and tokens are real in shape (bfloat16), physical
ids come from the device's own plan and reroute of every rank, slots are filled by the device's own
streams; see ``virtual_layer.py``.

``off`` computes everything on its master, ``balanced`` where the plan says, ``ideal`` as many rows
on every expert (wrong answers: for its time only). ``own_microseconds`` are our stages, which the
balanced layer has to wait for: each alone, from a CUDA graph, at rank 0; ``replicate`` is the
busiest sender's stream, at the rate of the device's own memory. ``replicate_over_link`` is what the
busiest link would take at the data sheet's NVLink rate times the share of it that is assumed to be
reached, as if all ranks were in one NVLink domain: an assumption, not a measurement.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from report import Report
from routes import Routes, hot_rank_routes, make_routes
from ultraep_kernels.device.plan import Given, Planner, Rows, Sender, plan_sizes
from ultraep_kernels.device.stream import Programs
from virtual_layer import (
    RELAY,
    Balanced,
    MoELayer,
    Work,
    balance,
    check_outputs,
    compute,
    make_layer,
)

from tests.support.bench import Bench
from tests.support.kernel_checks import (
    check_exchange,
    count_of,
    no_ids,
    require_equal,
    require_ok,
)
from tests.support.reroute_alone import reroute
from tests.support.virtual_ranks import VirtualRanks
from ultraep_lab.imbalance import imbalance
from ultraep_lab.machines import HARDWARE, LINK_SHARE, MODELS, ModelSizes
from ultraep_serve.balance.physical import forced_ids, identity_table, master_ids
from ultraep_serve.types import ExpertShape

LINK = "h100"  # whose NVLink is assumed
DEMO = {"ultraep-demo": ModelSizes(4096, 1536, 32, 4)}  # of UltraEP's examples/train_demo_moe.sh
RANKS_MEASURED = 48  # at least, over all rounds
FEW_RANKS = 16  # of which every imbalance is measured


@dataclass(frozen=True)
class Sizes:
    """One group of ranks that serves a model."""

    model: str
    shape: ExpertShape
    hidden: int
    inner: int
    top_k: int
    tokens: int  # of one rank
    samples: int  # tokens whose outputs are compared
    imbalances: tuple[float, ...]


def run(bench: Bench, report: Report, model: str, num_ranks: int, *hot: float) -> None:
    """Every imbalance; of a hot rank those of ``hot``."""
    sizes = tiny(num_ranks) if bench.interpreted else full(model, num_ranks)
    draw = hot_rank_routes if hot else make_routes
    if hot and not bench.interpreted:
        sizes = replace(sizes, imbalances=hot)
    made = sizes.shape, sizes.hidden, sizes.inner, sizes.tokens, sizes.top_k
    layer = make_layer(*made, bench.device)
    for wanted in sizes.imbalances:
        routes = draw(sizes.shape, sizes.tokens, sizes.top_k, wanted, bench.device)
        report.run(f"layer of {sizes.model}", check_layer, bench, sizes, layer, routes)


def full(model: str, num_ranks: int) -> Sizes:
    """The published shape of a model."""
    of = (DEMO | dict(MODELS))[model]
    shape = ExpertShape(num_ranks, of.num_experts, 2)
    of_expert = of.hidden_size, of.expert_size, of.experts_per_token
    imbalances = (1.5, 2.0, 3.0) if num_ranks <= FEW_RANKS else (2.0,)
    return Sizes(model, shape, *of_expert, 8192, 64, imbalances)


def tiny(num_ranks: int) -> Sizes:
    """For a dry run; the larger group has more than one slot."""
    shape = ExpertShape(2, 6, 1) if num_ranks < 64 else ExpertShape(3, 6, 2)
    return Sizes("nothing real", shape, 32, 16, 2, 24, 24 * shape.num_ranks, (1.4,))


def check_layer(bench: Bench, sizes: Sizes, layer: MoELayer, routes: Routes) -> dict[str, Any]:
    """Outputs of the balanced layer against the unbalanced one's and float64; everybody's times."""
    shape, ids = sizes.shape, routes.ids.view(-1, sizes.top_k)
    balanced = balance(bench, layer.ranks, routes.ids)
    require_equal(balanced.loads, routes.loads, "loads")
    places = shape.num_logical_experts, shape.num_ranks, shape.num_replica_slots
    table = torch.from_numpy(identity_table(*places)).to(bench.device)
    equal = torch.ones(shape.num_ranks, device=ids.device).long()
    works = {
        "off": Work.of(master_ids(ids, table), shape),
        "balanced": Work.of(balanced.physical, shape),
        "ideal": Work.of(forced_ids(ids, table, equal, 0), shape),
    }
    after = works["balanced"].counts.sum(1)
    require_equal(after, balanced.plans[0].quota.sum(0), "what ranks compute")
    errors = check_outputs(layer, ids, works["off"], works["balanced"], sizes.samples)
    times = rank_times(bench, layer, works)
    own = own_times(bench, layer.ranks, routes.ids[0], balanced)
    return {
        "checked": "outputs per token: balanced, off, float64",
        "hidden": sizes.hidden,
        "inner": sizes.inner,
        **routes.figures(),
        "imbalance_after": imbalance(after.numpy()),
        "replicas": int((balanced.slots >= 0).sum()),
        "rank_loads": {name: works[name].counts.sum(1).tolist() for name in ("off", "balanced")},
        **errors,
        **layer_times(times, own, over_link(layer.ranks, balanced)),
        "ideal_teraflops": teraflops(sizes, works["ideal"], times["ideal"]),
        "rank_microseconds": None if bench.interpreted else times,
    }


def rank_times(
    bench: Bench, layer: MoELayer, works: dict[str, Work]
) -> dict[str, list[float | None]]:
    """Microseconds of each rank's expert kernel alone, by CUDA events, warm; by name of the work.

    Works take turns on every rank, because a GPU's clock drifts. Small groups are measured
    in several rounds, of which the median counts.
    """
    ranks = range(layer.ranks.shape.num_ranks)
    times: dict[str, list[list[float | None]]] = {name: [[] for _ in ranks] for name in works}
    for _ in range(1 if bench.interpreted else max(1, RANKS_MEASURED // len(ranks))):
        for rank in ranks:
            for name, work in works.items():
                rows, ends = layer.inputs(work, rank)
                took = bench.launched(partial(compute, rows, ends, *layer.weights(rank)))
                times[name][rank].append(took)
    return {name: [_median(found) for found in of_ranks] for name, of_ranks in times.items()}


def _median(found: list[float | None]) -> float | None:
    known = [time for time in found if time is not None]
    return statistics.median(known) if known else None


def own_times(
    bench: Bench, ranks: VirtualRanks, ids: torch.Tensor, balanced: Balanced
) -> dict[str, float | None]:
    """Microseconds of every stage of ours, of rank 0 with ``ids`` (T, K)."""
    shape, loads, status = ranks.shape, balanced.loads, ranks.reach.status
    num_slots, busiest = shape.num_replica_slots, balanced.busiest
    counted, places = balanced.counted[0], balanced.plans[0].places
    count, sends = count_of(ids, shape.num_logical_experts), balanced.sends[busiest]
    sizes = plan_sizes(*loads.shape, num_slots)
    sender = Sender(source=0, relay=RELAY, epoch=sends.epoch)
    planner = Planner(sizes, Given(Rows.of(loads), status), sender)
    programs = Programs(bench.num_programs, bench.num_programs)
    stream = ranks.stream(busiest, balanced.slots, sends, programs)
    nothing, none = no_ids(loads)
    stages: dict[str, Callable[[], object]] = {
        "count": lambda: count(ids),
        "plan": lambda: planner(nothing, nothing, none),
        "replicate": lambda: stream.send(ranks.chunks[busiest]),
        "reroute": lambda: reroute(ids, places, num_slots, counted, status),
    }
    times = {name: bench.replayed(stage)[1] for name, stage in stages.items()}
    require_ok(status)
    times["exchange"] = check_exchange(bench, shape.num_ranks, shape.num_logical_experts)
    return times


def over_link(ranks: VirtualRanks, balanced: Balanced) -> float:
    """Microseconds that the busiest link is assumed to take for its experts."""
    sent = int(balanced.sends[balanced.busiest].tasks[:, 0].sum())
    received = int((balanced.slots >= 0).sum(1).max())
    expert_bytes = sum(tensor.shape[1] for tensor in ranks.experts[0])
    rate = LINK_SHARE * HARDWARE[LINK].link_bytes_per_second
    return 1e6 * max(sent, received) * expert_bytes / rate


def layer_times(
    times: dict[str, list[float | None]], own: dict[str, float | None], link: float
) -> dict[str, Any]:
    """What follows for the layer; without times, names only."""
    slowest = {
        name: max(known) if (known := [t for t in by_rank if t is not None]) else None
        for name, by_rank in times.items()
    }
    off, balanced, ideal = (slowest[name] for name in ("off", "balanced", "ideal"))
    figures: dict[str, Any] = {
        "layer_microseconds": slowest,
        "own_microseconds": own,
        "replicate_over_link_microseconds": link,
    }
    if off is None or balanced is None or ideal is None:
        return figures
    small = sum(time for name, time in own.items() if time and name != "replicate")
    on_device = balanced + small + (own["replicate"] or 0.0)
    linked = balanced + small + link
    return figures | {
        "of_ideal": ideal / balanced,
        "of_ideal_with_own": ideal / on_device,
        "of_ideal_with_own_over_link": ideal / linked,
        "speedup": off / balanced,
        "speedup_with_own": off / on_device,
        "speedup_with_own_over_link": off / linked,
        "speedup_of_ideal": off / ideal,
    }


def teraflops(sizes: Sizes, work: Work, times: list[float | None]) -> float | None:
    """That rank 0 reaches."""
    flops = 2 * 3 * sizes.hidden * sizes.inner * int(work.counts[0].sum())
    return flops / times[0] / 1e6 if times[0] else None
