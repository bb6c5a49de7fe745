"""What must hold for every plan, checked in plain numpy: in the self-check, and in the lab."""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import ExpertShape, IntArray

Integers = NDArray[np.integer]


def check_plan(
    loads: Integers, context: PlanContext, slot_expert: IntArray, quota: IntArray, shares: IntArray
) -> None:
    """Check one plan of policy quota, made from ``loads`` (R, E) and ``context``.

    ``slot_expert`` (R, S), ``quota`` (E, R) and ``shares`` (R_source, E, R_target), each source
    rank's, are as ``Plan`` has them. Raises ValueError, which names the first rule that is broken.
    """
    shape = context.shape
    _require(
        slot_expert.shape == (shape.num_ranks, shape.num_replica_slots), "slot_expert is (R, S)"
    )
    check_slots(slot_expert, context)
    check_split(loads, copies_of(slot_expert, shape), quota, shares)
    ranks, slots = np.nonzero(slot_expert >= 0)
    _require((quota[slot_expert[ranks, slots], ranks] > 0).all(), "a slot without quota is empty")
    check_home_first(loads, quota, shares)


def check_slots(slot_expert: IntArray, context: PlanContext) -> None:
    """Slots (R, any number), -1 empty, hold other ranks' experts of their domain, each once.

    Raises ValueError as ``check_plan``.
    """
    shape = context.shape
    ranks, slots = np.nonzero(slot_expert >= 0)
    experts = slot_expert[ranks, slots].astype(np.int64)
    masters = experts // shape.num_masters
    _require((slot_expert >= -1).all(), "an empty slot is -1")
    _require((experts < shape.num_logical_experts).all(), "slots hold logical experts")
    _require((masters != ranks).all(), "no slot holds an expert whose master is on its rank")
    held = np.unique(ranks * shape.num_logical_experts + experts)
    _require(held.size == experts.size, "no rank holds an expert twice")
    size = context.domain_size
    _require((masters // size == ranks // size).all(), "copies stay in their domain")


def check_split(loads: Integers, copies: IntArray, quota: IntArray, shares: IntArray) -> None:
    """Every assignment of ``loads`` (R, E) is computed once, on a rank with a copy, 1 in (E, R).

    Raises ValueError as ``check_plan``.
    """
    num_ranks, num_experts = loads.shape
    _require(quota.shape == (num_experts, num_ranks), "quota is (E, R)")
    _require(shares.shape == (num_ranks, num_experts, num_ranks), "shares are (R, E, R)")
    _require((quota >= 0).all(), "quotas are not negative")
    wide = np.int64
    _require(np.array_equal(quota.sum(1, wide), loads.sum(0, wide)), "quotas sum to the loads")
    _require((quota[copies == 0] == 0).all(), "quota lies only on masters and slots")
    _require((shares >= 0).all(), "shares are not negative")
    by_target, by_source = shares.sum(0, wide), shares.sum(2, wide)
    _require(np.array_equal(by_target, quota), "shares sum to the quota over source ranks")
    _require(np.array_equal(by_source, loads), "shares sum to the loads over target ranks")


def check_home_first(loads: Integers, quota: IntArray, shares: IntArray) -> None:
    """As many tokens as the quota allows stay on their own rank. Raises as ``check_plan``."""
    home = np.einsum("ses->se", shares)
    _require(
        np.array_equal(home, np.minimum(loads, quota.T)), "tokens stay home where quota allows"
    )


def master_copies(shape: ExpertShape) -> IntArray:
    """Every expert on its master and nowhere else, (E, R)."""
    copies = np.zeros((shape.num_logical_experts, shape.num_ranks), np.int32)
    experts = np.arange(shape.num_logical_experts)
    copies[experts, experts // shape.num_masters] = 1
    return copies


def copies_of(slot_expert: IntArray, shape: ExpertShape) -> IntArray:
    """Masters and what is in ``slot_expert`` (R, slots), -1 empty: copies (E, R)."""
    copies = master_copies(shape)
    ranks, slots = np.nonzero(slot_expert >= 0)
    copies[slot_expert[ranks, slots], ranks] = 1
    return copies


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise ValueError(f"broken plan: {rule}")
