"""Which rank holds which expert, how much of it it computes, and the split over source ranks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host._compile import compiled

from ultraep_serve.types import ExpertShape, IntArray

__all__ = [
    "Counts",
    "Placement",
    "PolicyPlan",
    "even_shares",
    "home_first_shares",
    "master_copies",
    "placement_from_quota",
    "slots_of",
]

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """One layer of one batch, before it is split over source ranks."""

    quota: IntArray  # (E, R): assignments of expert e that rank r computes
    copies: IntArray  # (E, R): 1 where rank r holds expert e
    slot_expert: IntArray | None  # (R, slots): -1 empty; None where masters moved or none is held

    @property
    def num_replicas(self) -> int:
        """Copies beyond one per expert, over all ranks."""
        return int(self.copies.sum() - len(self.copies))

    @property
    def slots_needed(self) -> int:
        """Experts beyond E / R on the rank that holds most."""
        num_experts, num_ranks = self.copies.shape
        return int(max(0, self.copies.sum(0).max() - num_experts // num_ranks))


@dataclass(frozen=True)
class PolicyPlan:
    """One layer of one batch, complete: the plans of all ranks in one."""

    slot_expert: IntArray | None  # (R, slots): as in Placement
    quota: IntArray  # (E, R)
    shares: IntArray  # (R_source, E, R_target)


def master_copies(shape: ExpertShape) -> IntArray:
    """Every expert on its master and nowhere else, (E, R)."""
    copies = np.zeros((shape.num_logical_experts, shape.num_ranks), np.int32)
    experts = np.arange(shape.num_logical_experts)
    copies[experts, experts // shape.num_masters] = 1
    return copies


def placement_from_quota(quota: Counts, shape: ExpertShape) -> Placement:
    """A copy wherever a rank computes what it is not the master of, ``quota`` (E, R).

    The slots are as many as the fullest rank needs, and at least ``num_replica_slots``.
    """
    masters = master_copies(shape)
    copies = np.maximum(masters, quota > 0).astype(np.int32)
    return Placement(quota.astype(np.int32), copies, slots_of(copies - masters, shape))


def slots_of(replicas: IntArray, shape: ExpertShape) -> IntArray:
    """Replicas (E, R) of 0 and 1 -> slot_expert (R, slots), experts in rising order, -1 empty."""
    width = max(shape.num_replica_slots, int(replicas.sum(0).max()))
    slot_expert = np.full((shape.num_ranks, width), -1, np.int32)
    for rank in range(shape.num_ranks):
        experts = np.flatnonzero(replicas[:, rank])
        slot_expert[rank, : experts.size] = experts
    return slot_expert


@compiled
def home_first_shares(loads: Counts, quota: IntArray) -> IntArray:
    """Keep tokens on their own rank where the quota allows, then fill targets in order.

    The same split as ``plan_quota`` gives rank by rank, for any placement: sources are laid out
    from rank ``expert % R`` on, targets from rank 0.

    Args:
        loads: int64 (R, E), row r is what rank r's own tokens chose.
        quota: int32 (E, R), rows sum to the loads' columns.

    Returns:
        int32 (R_source, E, R_target).
    """
    num_ranks, num_experts = loads.shape
    shares = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    left = np.zeros(num_ranks, np.int64)
    for expert in range(num_experts):
        for rank in range(num_ranks):
            home = min(loads[rank, expert], quota[expert, rank])
            shares[rank, expert, rank] = home
            left[rank] = quota[expert, rank] - home
        target = 0
        for step in range(num_ranks):
            source = (expert + step) % num_ranks
            todo = loads[source, expert] - shares[source, expert, source]
            while todo > 0 and target < num_ranks:
                part = min(todo, left[target])
                shares[source, expert, target] += part
                left[target] -= part
                todo -= part
                if left[target] == 0:
                    target += 1
    return shares


@compiled
def even_shares(loads: Counts, copies: IntArray) -> IntArray:
    """Deal each expert's assignments to its copies in turn, whatever rank they come from.

    Dealing goes on where the expert before stopped, so the rounding does not favour any rank.

    Args:
        loads: int64 (R, E), row r is what rank r's own tokens chose.
        copies: int32 (E, R), 1 where rank r holds expert e.

    Returns:
        int32 (R_source, E, R_target).
    """
    num_ranks, num_experts = loads.shape
    shares = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    holders = np.zeros(num_ranks, np.int64)
    position = 0
    for expert in range(num_experts):
        count = 0
        for rank in range(num_ranks):
            if copies[expert, rank] > 0:
                holders[count] = rank
                count += 1
        for source in range(num_ranks):
            load = loads[source, expert]
            for copy in range(count):
                shares[source, expert, holders[copy]] = load // count
            for extra in range(load % count):
                shares[source, expert, holders[(position + extra) % count]] += 1
            position = (position + load) % (1 << 30)
    return shares
