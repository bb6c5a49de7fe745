"""Policy ``quota``: copy experts into slots and split their load by the exact counts."""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.plan import search_of

from ultraep_serve.policies._place import place_replicas
from ultraep_serve.policies._share import count_experts, split_quota
from ultraep_serve.types import ExpertShape, Plan

__all__ = ["identity_plan", "plan_quota", "warm_up"]

MOST_ASSIGNMENTS = np.iinfo(np.int32).max  # of one expert: a quota is int32


def plan_quota(
    loads: NDArray[np.integer],
    shape: ExpertShape,
    source_rank: int,
    *,
    domain_size: int | None = None,
) -> Plan:
    """Plan one layer of one batch: the same slots and quotas on every rank.

    Minimises the largest rank load, then the replicas sent by the busiest rank, then the replicas.
    Loads within 1/512 of each other count as equal, so a layer that is balanced to that degree
    keeps every expert on its master.

    Args:
        loads: integers (R, E), assignments; row r is what rank r's own tokens chose.
        shape: R, E and S.
        source_rank: rank whose ``share`` is wanted.
        domain_size: copies stay within contiguous groups of this many ranks; None is all ranks.

    Raises:
        ValueError: ``loads`` is negative, too large or of another shape, or a rank or domain is
            out of range.
    """
    counts = _checked(loads, shape, source_rank)
    if domain_size is None:
        domain_size = shape.num_ranks
    if domain_size < 1:
        raise ValueError(f"{domain_size = } must be at least 1")
    expert_load = _count(counts)
    search = search_of(min(domain_size, shape.num_ranks), shape.num_masters)
    slot_expert, slot_quota = place_replicas(
        expert_load, shape.num_ranks, shape.num_replica_slots, domain_size, *search
    )
    quota, share = split_quota(counts, expert_load, slot_expert, slot_quota, source_rank)
    return Plan(slot_expert=slot_expert, quota=quota, share=share)


def identity_plan(loads: NDArray[np.integer], shape: ExpertShape, source_rank: int) -> Plan:
    """Every expert on its master, no replicas; arguments and errors as ``plan_quota``."""
    counts = _checked(loads, shape, source_rank)
    slot_expert = np.full((shape.num_ranks, shape.num_replica_slots), -1, np.int32)
    slot_quota = np.zeros(slot_expert.shape, np.int64)
    quota, share = split_quota(counts, _count(counts), slot_expert, slot_quota, source_rank)
    return Plan(slot_expert=slot_expert, quota=quota, share=share)


def warm_up(shape: ExpertShape) -> None:
    """Compile the planner, or load it from disk, so that no batch waits for that."""
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), np.int64)
    plan_quota(loads, shape, source_rank=0)


def _checked(loads: NDArray[np.integer], shape: ExpertShape, source_rank: int) -> NDArray[np.int64]:
    expected = (shape.num_ranks, shape.num_logical_experts)
    if loads.shape != expected or not np.issubdtype(loads.dtype, np.integer):
        raise ValueError(f"loads is {loads.dtype} {loads.shape}, must be integers {expected}")
    if shape.num_masters * shape.num_ranks != shape.num_logical_experts:
        raise ValueError(f"{shape = }: num_logical_experts must be a multiple of num_ranks")
    if not 0 <= source_rank < shape.num_ranks:
        raise ValueError(f"{source_rank = } must be in [0, {shape.num_ranks})")
    return np.ascontiguousarray(loads, dtype=np.int64)


def _count(loads: NDArray[np.int64]) -> NDArray[np.int64]:
    expert_load = count_experts(loads)
    if expert_load[0] < 0:
        raise ValueError("loads must not be negative")
    if expert_load.max() > MOST_ASSIGNMENTS:
        raise ValueError(
            f"expert {expert_load.argmax()} has {expert_load.max()} assignments, "
            f"at most {MOST_ASSIGNMENTS} fit a quota; use smaller batches"
        )
    return expert_load
