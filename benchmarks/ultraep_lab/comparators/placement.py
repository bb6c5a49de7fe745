"""Which rank holds which expert, how much of it it computes, and the split over source ranks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host._compile import compiled

from ultraep_serve.plan.checks import copies_of, master_copies
from ultraep_serve.types import ExpertShape, IntArray, Plan

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """The plans of all ranks for one layer of one batch."""

    quota: IntArray  # (E, R): assignments of expert e that rank r computes
    copies: IntArray  # (E, R): 1 where rank r holds expert e
    slot_expert: IntArray | None = None  # (R, slots): -1 empty; None where masters moved
    copied: IntArray | None = None  # of ``slot_expert``, in this batch; None: all of it
    shares: IntArray | None = None  # (R_source, E, R_target), once split over source ranks

    @property
    def num_replicas(self) -> int:
        """Copies beyond one per expert, over all ranks."""
        return int(self.copies.sum() - len(self.copies))

    @property
    def slots_needed(self) -> int:
        """Experts beyond E / R on the rank that holds most."""
        num_experts, num_ranks = self.copies.shape
        return int(max(0, self.copies.sum(0).max() - num_experts // num_ranks))


def of_plan(plan: Plan, shape: ExpertShape) -> Placement:
    """The placement of a plan as a server makes it."""
    return Placement(plan.quota, copies_of(plan.slot_expert, shape), plan.slot_expert)


def of_quota(quota: Counts, shape: ExpertShape) -> Placement:
    """A copy wherever a rank computes an expert that it is not the master of, ``quota`` (E, R)."""
    copies = np.maximum(master_copies(shape), quota > 0).astype(np.int32)
    return Placement(quota.astype(np.int32), copies, slots_of(copies, shape))


def of_copies(loads: Counts, copies: IntArray) -> Placement:
    """``loads`` (R, E) split evenly among ``copies`` (E, R)."""
    return Placement(even_shares(loads, copies).sum(0, dtype=np.int32), copies)


def slots_of(copies: IntArray, shape: ExpertShape) -> IntArray:
    """Copies (E, R), masters among them -> slot_expert (R, slots), in rising order, -1 empty.

    There are as many slots as the fullest rank needs, and at least ``num_replica_slots``.
    """
    replicas = copies - master_copies(shape)
    width = max(shape.num_replica_slots, int(replicas.sum(0).max()))
    slot_expert = np.full((shape.num_ranks, width), -1, np.int32)
    for rank in range(shape.num_ranks):
        experts = np.flatnonzero(replicas[:, rank])
        slot_expert[rank, : experts.size] = experts
    return slot_expert


@compiled
def even_shares(loads: Counts, copies: IntArray) -> IntArray:
    """Deal each expert's assignments to its copies in turn, whatever rank they come from.

    Dealing goes on where the expert before stopped, so that rounding does not favour any rank.

    Args:
        loads: int64 (R, E), row r is what rank r's own tokens chose.
        copies: int32 (E, R), how many copies of expert e rank r holds.

    Returns:
        int32 (R_source, E, R_target).
    """
    num_ranks, num_experts = loads.shape
    shares = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    holders = np.zeros(copies.sum(), np.int64)  # of one expert's copies
    position = 0
    for expert in range(num_experts):
        count = 0
        for rank in range(num_ranks):
            for _ in range(copies[expert, rank]):
                holders[count] = rank
                count += 1
        for source in range(num_ranks):
            load = loads[source, expert]
            for copy in range(count):
                shares[source, expert, holders[copy]] += load // count
            for extra in range(load % count):
                shares[source, expert, holders[(position + extra) % count]] += 1
            position = (position + load) % (1 << 30)
    return shares


@compiled
def home_first_shares(loads: Counts, quota: IntArray) -> IntArray:
    """Keep tokens on their own rank where the quota allows, then fill targets in order.

    The split that ``plan_quota`` makes rank by rank, for any placement: sources are laid out from
    rank ``expert % R`` on, targets from rank 0.

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
