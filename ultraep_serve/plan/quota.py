"""Policy ``quota``: copy experts into slots and split their load by the exact counts."""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import HEADER_WIDTH, Prices
from ultraep_kernels.host import plan as kernel

from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.residents import Residents
from ultraep_serve.types import ExpertShape, Plan


def plan_quota(loads: NDArray[np.integer], context: PlanContext, source_rank: int) -> Plan:
    """Plan one layer of one batch: the same slots and quotas on every rank.

    Minimises the busiest rank's time, its assignments over its speed, then the replicas sent by one
    rank, then the replicas. Times within 1/512 of each other count as equal, so a layer that is
    balanced to that degree keeps every expert on its master.

    Row r of ``loads`` (R, E) is what rank r's own tokens chose; the ``share`` is that of
    ``source_rank``. Raises ValueError where ``loads`` are negative, too large or of another shape,
    or there is no such rank.
    """
    expected = context.shape.num_ranks, context.shape.num_logical_experts
    if loads.shape != expected or not np.issubdtype(loads.dtype, np.integer):
        raise ValueError(f"loads is {loads.dtype} {loads.shape}, must be integers {expected}")
    if not 0 <= source_rank < expected[0]:
        raise ValueError(f"{source_rank = } must be in [0, {expected[0]})")
    counts = np.asarray(loads, np.int64)  # rows may be apart: a copy can cost more than a plan
    slots = context.shape.num_replica_slots
    return kernel.plan(counts, slots, source_rank, context.domain_size, context.speeds)


def warm_up(shape: ExpertShape) -> None:
    """Compile the planner, or load it from disk, so that no batch waits for that.

    Loads that an exchange brought lie behind their rows' headers, others side by side.
    """
    rows = np.zeros((shape.num_ranks, HEADER_WIDTH + shape.num_logical_experts), np.int64)
    loads = rows[:, HEADER_WIDTH:]
    plan_quota(loads, PlanContext.of(shape), source_rank=0)
    plan_quota(loads.copy(), PlanContext.of(shape), source_rank=0)
    Residents(shape, layer=0).plan(loads, PlanContext.of(shape), 0, Prices())
