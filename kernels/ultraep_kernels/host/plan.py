"""plan: loads (R, E) and speeds -> slot_expert, quota and one rank's share; the quota planner.

``_plan_search`` finds where replicas go and what each computes, ``_plan_residents`` does where
those of batches before are there still, ``_plan_share`` splits that over source ranks. Twin:
``device.plan``.
"""

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import IntArray, Plan, Prices, search_of
from ultraep_kernels.host._plan_residents import keep_replicas
from ultraep_kernels.host._plan_search import busiest_time, least_time, place_replicas
from ultraep_kernels.host._plan_share import count_experts, split_quota

__all__ = ["busiest_time", "least_time", "plan", "plan_beside_residents"]

_MOST_ASSIGNMENTS = np.iinfo(np.int32).max  # of one expert: a quota is int32


def plan(
    loads: NDArray[np.int64],
    num_replica_slots: int,
    source_rank: int,
    domain_size: int,
    speeds: NDArray[np.int64],
) -> Plan:
    """Plan one layer of one batch: the same slots and quotas on every rank, as on a device.

    Row r of ``loads`` int64 (R, E), which may be apart from others, is what rank r's own tokens
    chose, E a multiple of R; ``num_replica_slots`` S may be 0. The ``share`` is that of
    ``source_rank``. Copies stay within contiguous groups of ``domain_size`` ranks; ``speeds``
    int64 (R,) are each 1 to FULL_SPEED. Raises ValueError where a load is negative or too large.
    """
    num_ranks, num_experts = loads.shape
    expert_load = _count(loads)
    search = search_of(domain_size, num_experts // num_ranks)
    slot_expert, slot_quota = place_replicas(
        expert_load, speeds, num_replica_slots, domain_size, search
    )
    quota, share = split_quota(loads, expert_load, slot_expert, slot_quota, source_rank)
    return Plan(slot_expert, copied=slot_expert, quota=quota, share=share)


def plan_beside_residents(
    loads: NDArray[np.int64],
    stayed: tuple[NDArray[np.int64], IntArray],
    source_rank: int,
    domain_size: int,
    speeds: NDArray[np.int64],
    prices: Prices,
    is_turn: bool,
) -> Plan:
    """Plan one layer of one batch, where slots hold copies from batches before.

    ``stayed``, ``prices`` and ``is_turn`` as ``keep_replicas`` takes them, and else as ``plan``.
    """
    num_ranks, num_experts = loads.shape
    expert_load = _count(loads)
    search = search_of(domain_size, num_experts // num_ranks)
    held, slot_quota = keep_replicas(
        expert_load, stayed, speeds, domain_size, prices, is_turn, search
    )
    slot_expert = np.where(slot_quota > 0, held, np.int32(-1))
    quota, share = split_quota(loads, expert_load, slot_expert, slot_quota, source_rank)
    return Plan(slot_expert, np.where(held != stayed[1], held, np.int32(-1)), quota, share)


def _count(loads: NDArray[np.int64]) -> NDArray[np.int64]:
    expert_load = count_experts(loads)
    if expert_load[0] < 0:
        raise ValueError("loads must not be negative")
    if expert_load.max() > _MOST_ASSIGNMENTS:
        raise ValueError(
            f"expert {expert_load.argmax()} has {expert_load.max()} assignments, "
            f"at most {_MOST_ASSIGNMENTS} fit a quota; use smaller batches"
        )
    return expert_load
