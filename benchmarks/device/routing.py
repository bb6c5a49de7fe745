"""Plan, and count with reroute, of one rank: the same answers as on CPU, and in what time."""

from dataclasses import dataclass
from typing import Any

import torch
from bench import Bench
from report import Report, require_equal, require_ok
from routes import Routes, make_routes
from ultraep_kernels.device.count import count
from ultraep_kernels.device.plan import plan
from ultraep_kernels.device.reroute import reroute
from ultraep_kernels.device.status import new_status
from ultraep_kernels.host.count import count_reference
from ultraep_kernels.host.reroute import reroute as reroute_on_cpu

from ultraep_serve.planner.quota import plan_quota
from ultraep_serve.types import ExpertShape, Plan, imbalance

PLAN_TARGET, ROUTING_TARGET = 40.0, 20.0  # microseconds, at the published sizes


@dataclass(frozen=True)
class Case:
    """One size."""

    shape: ExpertShape
    imbalances: tuple[float, ...] = (2.0,)
    tokens: int = 8192  # of one rank
    top_k: int = 8
    has_target: bool = False


PUBLISHED = ExpertShape(64, 256, 2)
FULL = (
    Case(PUBLISHED, (1.5, 2.0, 3.0), has_target=True),
    Case(ExpertShape(8, 128, 2)),
    Case(ExpertShape(16, 128, 2)),
    Case(ExpertShape(32, 256, 2)),
    Case(PUBLISHED, tokens=1024),
    Case(PUBLISHED, tokens=32768),
    Case(ExpertShape(64, 256, 1)),
    Case(ExpertShape(72, 504, 2)),
)
TINY = (Case(ExpertShape(4, 16, 2), (1.5, 3.0), tokens=50, top_k=2, has_target=True),)


def run(bench: Bench, report: Report) -> None:
    """Every size at every imbalance."""
    for case in TINY if bench.dry_run else FULL:
        for wanted in case.imbalances:
            routes = make_routes(case.shape, case.tokens, case.top_k, wanted, bench.device)
            expected = plan_quota(routes.loads, case.shape, 0)
            report.run("plan", check_plan, bench, case, routes, expected)
            report.run("count + reroute", check_routing, bench, case, routes, expected)


def check_plan(bench: Bench, case: Case, routes: Routes, expected: Plan) -> dict[str, Any]:
    """Rank 0's plan."""
    loads = torch.from_numpy(routes.loads).int().to(bench.device)
    status = new_status(bench.device)
    found, microseconds = bench.replayed(
        lambda: plan(loads, case.shape.num_replica_slots, 0, status)
    )
    for name in ("slot_expert", "quota", "share"):
        require_equal(getattr(found, name), getattr(expected, name), name)
    require_ok(status)
    return {
        "checked": "ultraep_serve.planner.plan_quota",
        **routes.figures(),
        "imbalance_after": imbalance(expected.quota.sum(0)),
        **timed(microseconds, PLAN_TARGET if case.has_target else None),
    }


def check_routing(bench: Bench, case: Case, routes: Routes, expected: Plan) -> dict[str, Any]:
    """Rank 0's ids through count and reroute, by the plan that the CPU made."""
    shape, ids, status = case.shape, routes.ids[0], new_status(bench.device)
    share = torch.from_numpy(expected.share).to(bench.device)
    slot_expert = torch.from_numpy(expected.slot_expert).to(bench.device)

    def route() -> tuple[torch.Tensor, torch.Tensor]:
        counted = count(ids, shape.num_logical_experts)
        physical = reroute(ids, counted, share, slot_expert, shape.num_masters, status)
        return counted.load, physical

    (load, physical), microseconds = bench.replayed(route)
    require_equal(load, count_reference(ids.cpu(), shape.num_logical_experts)[0], "count")
    twin = reroute_on_cpu(ids.cpu(), expected.share, expected.slot_expert, shape.num_masters)
    require_equal(physical, twin, "reroute")
    require_ok(status)
    return {
        "checked": "ultraep_kernels.host.reroute.reroute",
        **routes.figures(),
        **timed(microseconds, ROUTING_TARGET if case.has_target else None),
    }


def timed(microseconds: float | None, at_most: float | None) -> dict[str, Any]:
    """A time from a CUDA graph, and whether it met its target, where it has one."""
    met = microseconds <= at_most if microseconds and at_most else None
    return {"graph_microseconds": microseconds, "at_most": at_most, "met": met}
