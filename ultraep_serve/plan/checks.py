"""What must hold for every plan, checked in plain numpy; for tests and for replayed traces."""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.types import ExpertShape

__all__ = ["check_plan", "imbalance_floor"]

Integers = NDArray[np.integer]


def check_plan(
    loads: Integers,
    shape: ExpertShape,
    plan_slot_expert: Integers,
    quota: Integers,
    shares: Integers,
    *,
    domain_size: int | None = None,
) -> None:
    """Check one plan with the shares of all source ranks.

    Args:
        loads: (R, E) what the plan was made from.
        shape: R, E and S.
        plan_slot_expert: (R, S), -1 empty.
        quota: (E, R).
        shares: (R_source, E, R_target), each source rank's ``Plan.share``.
        domain_size: the one the plan was made with.

    Raises:
        ValueError: names the first rule that is broken.
    """
    num_ranks, num_experts = shape.num_ranks, shape.num_logical_experts
    _require(
        plan_slot_expert.shape == (num_ranks, shape.num_replica_slots), "slot_expert is (R, S)"
    )
    _require(quota.shape == (num_experts, num_ranks), "quota is (E, R)")
    _require(shares.shape == (num_ranks, num_experts, num_ranks), "shares are (R, E, R)")
    _check_slots(shape, plan_slot_expert, domain_size or num_ranks)
    counts, quotas, parts = (array.astype(np.int64) for array in (loads, quota, shares))
    _check_quota(counts, shape, plan_slot_expert, quotas)
    _check_shares(counts, quotas, parts)


def imbalance_floor(
    loads: Integers, *, domain_size: int | None = None, speeds: Integers | None = None
) -> float:
    """What the imbalance of no plan can go below, ``loads`` (R, E), ``speeds`` (R,) or all equal.

    The largest domain's mean over the global mean; with speeds, of assignments per speed.
    """
    num_ranks, num_experts = loads.shape
    master_load = loads.astype(np.int64).sum(0).reshape(num_ranks, num_experts // num_ranks).sum(1)
    if not master_load.any():
        return 1.0
    speed = np.ones(num_ranks) if speeds is None else speeds
    size = domain_size or num_ranks
    domains = [slice(first, first + size) for first in range(0, num_ranks, size)]
    means = [master_load[domain].sum() / speed[domain].sum() for domain in domains]
    return float(max(means) / (master_load.sum() / speed.sum()))


def _check_slots(shape: ExpertShape, slot_expert: Integers, domain_size: int) -> None:
    ranks, slots = np.nonzero(slot_expert >= 0)
    experts = slot_expert[ranks, slots].astype(np.int64)
    masters = experts // shape.num_masters
    _require((slot_expert >= -1).all(), "an empty slot is -1")
    _require((experts < shape.num_logical_experts).all(), "slots hold logical experts")
    _require((masters != ranks).all(), "no slot holds an expert whose master is on its rank")
    held = set(zip(ranks.tolist(), experts.tolist(), strict=True))
    _require(len(held) == len(experts), "no rank holds an expert twice")
    _require((masters // domain_size == ranks // domain_size).all(), "copies stay in their domain")


def _check_quota(
    loads: NDArray[np.int64], shape: ExpertShape, slot_expert: Integers, quota: NDArray[np.int64]
) -> None:
    _require((quota >= 0).all(), "quotas are not negative")
    _require(np.array_equal(quota.sum(1), loads.sum(0)), "quotas sum to the loads")
    ranks, slots = np.nonzero(slot_expert >= 0)
    experts = slot_expert[ranks, slots]
    allowed = np.zeros(quota.shape, bool)
    allowed[experts, ranks] = True
    _require((quota[allowed] > 0).all(), "a slot without quota is empty")
    every = np.arange(shape.num_logical_experts)
    allowed[every, every // shape.num_masters] = True
    _require((quota[~allowed] == 0).all(), "quota lies only on masters and slots")


def _check_shares(
    loads: NDArray[np.int64], quota: NDArray[np.int64], shares: NDArray[np.int64]
) -> None:
    _require((shares >= 0).all(), "shares are not negative")
    _require(np.array_equal(shares.sum(0), quota), "shares sum to the quota over source ranks")
    _require(np.array_equal(shares.sum(2), loads), "shares sum to the loads over target ranks")
    home = np.einsum("ses->se", shares)
    _require(
        np.array_equal(home, np.minimum(loads, quota.T)), "tokens stay home where quota allows"
    )


def _require(holds: bool | np.bool_, rule: str) -> None:
    if not holds:
        raise ValueError(f"broken plan: {rule}")
