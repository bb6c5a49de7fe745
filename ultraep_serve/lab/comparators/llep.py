"""Policy ``llep``: what overloads a rank spills to the least loaded ranks, weights go along.

Source: "Least-Loaded Expert Parallelism: Load Balancing An Imbalanced Mixture-of-Experts"
(Nguyen et al., arXiv 2601.17111). Below an imbalance of lambda nothing is done. Otherwise experts
are taken from the heaviest to the lightest; each stays at home while the home rank, with all
that it still has to take itself, is within alpha times the mean, and the rest goes to the least
loaded ranks in parts of at least ``m``. Slots are not reserved, so their number is reported.

alpha 1.1, lambda 1.3 and m 1024 are the published defaults. Small batches have fewer than 1024
assignments to spare on any rank and would never spill, so m is at most a sixteenth of the mean.
Weights move within the batch, hence within a domain.
"""

import numpy as np

from ultraep_serve.lab.comparators.placement import Counts, Placement, of_quota
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.copies import master_copies
from ultraep_serve.types import imbalance

__all__ = ["place_llep"]

CAPACITY_FACTOR = 1.1  # alpha
SKIP_BELOW = 1.3  # lambda
SMALLEST_PART = 1024  # m


def place_llep(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    """``history``, speeds and the number of slots are not used."""
    shape, expert_load = context.shape, loads.sum(0)
    quota = master_copies(shape).astype(np.int64) * expert_load[:, None]
    if imbalance(quota.sum(0)) >= SKIP_BELOW:
        for domain in context.domains:
            own = slice(domain.start * shape.num_masters, domain.stop * shape.num_masters)
            quota[own, domain] = _spill(expert_load[own], domain.stop - domain.start)
    return of_quota(quota, shape)


def _spill(expert_load: Counts, num_ranks: int) -> Counts:
    """Quota (E, R) of one domain, experts and ranks numbered from its first."""
    num_masters = expert_load.size // num_ranks
    quota = np.zeros((expert_load.size, num_ranks), np.int64)
    capacity = int(CAPACITY_FACTOR * expert_load.sum() / num_ranks)
    smallest = min(SMALLEST_PART, int(expert_load.sum() / num_ranks) // 16)
    # Assigned so far, plus what is still at home and not yet assigned.
    rank_load = expert_load.reshape(num_ranks, num_masters).sum(1)
    for expert in np.argsort(-expert_load, kind="stable"):
        home = expert // num_masters
        excess = min(max(0, rank_load[home] - capacity), expert_load[expert])
        if excess < smallest:
            excess = 0
        rank_load[home] -= excess
        for rank in np.argsort(rank_load, kind="stable"):
            part = min(excess, capacity - rank_load[rank])
            if rank != home and (part >= smallest or part == excess) and part > 0:
                quota[expert, rank] = part
                rank_load[rank] += part
                excess -= part
        rank_load[home] += excess  # no rank had room for it
        quota[expert, home] = expert_load[expert] - quota[expert].sum()
    return quota
