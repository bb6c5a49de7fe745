"""Stages of one rank, and the copies of all ranks at the same time: right, and in what time."""

from dataclasses import dataclass
from typing import Any

import torch
from report import Report
from routes import Routes, make_routes

from tests.support.bench import Bench
from tests.support.kernel_checks import check_count_and_reroute, check_exchange, check_plan
from tests.support.virtual_ranks import VirtualRanks, check_stream, fill_masters, make_ranks
from ultraep_lab.imbalance import imbalance
from ultraep_serve.balance.cuda.fabric import MOST_CHUNK_BYTES
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape, Plan

COPY_BYTES = 4 << 30  # of the buffer that tells the device's own bandwidth
IMBALANCE = 2.0


@dataclass(frozen=True)
class RoutingCase:
    """One size of plan, and of count with reroute."""

    shape: ExpertShape
    imbalances: tuple[float, ...] = (IMBALANCE,)
    tokens: int = 8192  # of one rank
    top_k: int = 8
    plan_at_most: float | None = None  # microseconds; this and the next are targets
    reroute_at_most: float | None = None


PUBLISHED = ExpertShape(64, 256, 2)
ROUTING = (
    RoutingCase(PUBLISHED, (1.5, 2.0, 3.0), plan_at_most=35.0, reroute_at_most=20.0),
    RoutingCase(ExpertShape(8, 128, 2)),
    RoutingCase(ExpertShape(16, 128, 2)),
    RoutingCase(ExpertShape(32, 256, 2)),
    RoutingCase(PUBLISHED, tokens=1024),
    RoutingCase(PUBLISHED, tokens=32768),
    RoutingCase(ExpertShape(64, 256, 1)),
    RoutingCase(ExpertShape(72, 288, 2), plan_at_most=50.0),
    RoutingCase(ExpertShape(72, 504, 2), plan_at_most=70.0),
    RoutingCase(ExpertShape(56, 896, 2), top_k=16),
    RoutingCase(ExpertShape(64, 896, 2), top_k=16),
)
TINY_ROUTING = (RoutingCase(ExpertShape(4, 16, 2), tokens=50, top_k=2, plan_at_most=35.0),)
EXCHANGES = ((8, 128), (16, 128), (64, 256), (72, 504), (64, 896))  # (R, E)


@dataclass(frozen=True)
class BatchSizes:
    """One layer of one batch whose experts are copied."""

    shape: ExpertShape
    tokens: int  # of one rank
    top_k: int
    tensor_bytes: tuple[int, ...]  # of one expert
    chunk_bytes: int

    @classmethod
    def on(cls, bench: Bench) -> "BatchSizes":
        """FP8 weights and block scales; tiny ones, which are not aligned, under the interpreter."""
        if bench.interpreted:
            return cls(ExpertShape(4, 8, 2), 20, 2, (80, 37), 64)
        return cls(PUBLISHED, 8192, 8, (4096 * 4096, 4096 * 2048, 8192, 4096), MOST_CHUNK_BYTES)


def routing(bench: Bench, report: Report) -> None:
    """Plan, and count with reroute, of rank 0: every size at every imbalance."""
    for case in TINY_ROUTING if bench.interpreted else ROUTING:
        for wanted in case.imbalances:
            routes = make_routes(case.shape, case.tokens, case.top_k, wanted, bench.device)
            expected = plan_quota(routes.loads, PlanContext.of(case.shape), 0)
            report.run("plan", time_plan, bench, case, routes, expected)
            report.run("count + reroute", time_routing, bench, case, routes, expected)


def time_plan(bench: Bench, case: RoutingCase, routes: Routes, expected: Plan) -> dict[str, Any]:
    """Rank 0's plan."""
    microseconds = check_plan(bench, routes.loads, case.shape)
    return {
        "checked": "ultraep_serve.plan.plan_quota",
        **routes.figures(),
        "imbalance_after": imbalance(expected.quota.sum(0)),
        **timed(microseconds, case.plan_at_most),
    }


def time_routing(bench: Bench, case: RoutingCase, routes: Routes, expected: Plan) -> dict[str, Any]:
    """Rank 0's ids through count and reroute, by the plan that the CPU made."""
    masters = case.shape.num_masters
    microseconds = check_count_and_reroute(bench, routes.ids[0], expected, masters)
    return {
        "checked": "ultraep_kernels.host.reroute.reroute",
        **routes.figures(),
        **timed(microseconds, case.reroute_at_most),
    }


def timed(microseconds: float | None, at_most: float | None) -> dict[str, Any]:
    """A time from a CUDA graph, and whether it met its target, where it has one."""
    met = microseconds <= at_most if microseconds and at_most else None
    return {"graph_microseconds": microseconds, "at_most": at_most, "met": met}


def exchanging(bench: Bench, report: Report) -> None:
    """One rank's exchange, all of whose peers have posted: the part that is no waiting."""
    for num_ranks, num_experts in ((4, 16),) if bench.interpreted else EXCHANGES:
        report.run("exchange", time_exchange, bench, num_ranks, num_experts)


def time_exchange(bench: Bench, num_ranks: int, num_experts: int) -> dict[str, Any]:
    """Rows of all peers, from an inbox that they have filled."""
    microseconds = check_exchange(bench, num_ranks, num_experts)
    return {
        "checked": "the rows posted",
        "ranks": num_ranks,
        "experts": num_experts,
        "graph_microseconds": microseconds,
    }


def streaming(bench: Bench, report: Report) -> None:
    """All virtual ranks' copies of one plan: direct, and with relays wherever they can be."""
    sizes = BatchSizes.on(bench)
    routes = make_routes(sizes.shape, sizes.tokens, sizes.top_k, IMBALANCE, bench.device)
    planned = plan_quota(routes.loads, PlanContext.of(sizes.shape), 0).slot_expert
    slots = torch.from_numpy(planned).to(bench.device)
    ranks = make_ranks(sizes.shape, sizes.tensor_bytes, sizes.chunk_bytes, bench.device)
    fill_masters(ranks)
    copy_rate = measure_copy(bench, 64 if bench.interpreted else COPY_BYTES)
    for epoch, mode in enumerate(("never", "always"), 1):
        arguments = bench, sizes, ranks, slots, mode, epoch, copy_rate
        report.run(f"stream, relay {mode}", time_stream, *arguments)


def time_stream(
    bench: Bench,
    sizes: BatchSizes,
    ranks: VirtualRanks,
    slots: torch.Tensor,
    mode: str,
    epoch: int,
    copy_rate: float | None,
) -> dict[str, Any]:
    """How fast the masters' bytes came, all ranks at once, beside the device's own plain copy.

    All ranks share one memory, so this has no target.
    """
    microseconds = check_stream(bench, ranks, slots, mode, epoch)
    moved = int((slots >= 0).sum()) * sum(sizes.tensor_bytes)
    rate = 2e-3 * moved / microseconds if microseconds else None
    return {
        "checked": "the masters' bytes",
        "ranks": sizes.shape.num_ranks,
        "megabytes": moved / 1e6,
        "graph_microseconds": microseconds,
        "gigabytes_per_second": rate,  # read and written
        "copy_gigabytes_per_second": copy_rate,
        "of_copy": rate / copy_rate if rate and copy_rate else None,
    }


def measure_copy(bench: Bench, num_bytes: int) -> float | None:
    """Gigabytes per second, read and written, of the device's own copy of a large buffer."""
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=bench.device)
    target = torch.empty_like(source)
    _, microseconds = bench.replayed(lambda: target.copy_(source))
    return 2e-3 * num_bytes / microseconds if microseconds else None
