"""Policy ``llep``: what overloads a rank spills to the least loaded ranks, weights go along.

Source: "Least-Loaded Expert Parallelism: Load Balancing An Imbalanced Mixture-of-Experts"
(Nguyen et al., arXiv 2601.17111) and its public code
(https://github.com/SalesforceAIResearch/LeastLoadedEP), with the published defaults: alpha 1.1,
lambda 1.3, m 1024. Below an imbalance of lambda nothing is done. Otherwise experts are taken from
the heaviest to the lightest. A rank's load is what it was given so far and its own experts that are
still to come. An expert stays at home as far as that is within alpha times the mean. The rest goes
to other ranks, the least loaded first, as much to each as has room there; a part of less than m is
not split off. What then finds no room goes to the least loaded other rank as a whole.

Slots are not reserved, so their number is reported. Weights move within the batch, hence within a
domain.
"""

import numpy as np

from ultraep_lab.comparators.placement import Counts, Placement, of_quota
from ultraep_lab.imbalance import domains_of, imbalance
from ultraep_serve.plan.checks import master_copies
from ultraep_serve.plan.context import PlanContext

CAPACITY_FACTOR = 1.1  # alpha
SKIP_BELOW = 1.3  # lambda
SMALLEST_PART = 1024  # m


def place_llep(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    """``history``, speeds and the number of slots are not used."""
    shape, expert_load = context.shape, loads.sum(0)
    quota = master_copies(shape).astype(np.int64) * expert_load[:, None]
    if imbalance(quota.sum(0)) >= SKIP_BELOW:
        for domain in domains_of(context):
            own = slice(domain.start * shape.num_masters, domain.stop * shape.num_masters)
            quota[own, domain] = _spill(expert_load[own], domain.stop - domain.start)
    return of_quota(quota, shape)


def _spill(expert_load: Counts, num_ranks: int) -> Counts:
    """Quota (E, R) of one domain, experts and ranks numbered from its first."""
    num_masters = expert_load.size // num_ranks
    quota = np.zeros((expert_load.size, num_ranks), np.int64)
    capacity = max(1, int(CAPACITY_FACTOR * (expert_load.sum() // num_ranks)))
    # Assigned so far, plus what is still at home and not yet assigned.
    rank_load = expert_load.reshape(num_ranks, num_masters).sum(1)
    for expert in np.argsort(-expert_load, kind="stable"):
        home = expert // num_masters
        excess = int(min(max(0, rank_load[home] - capacity), expert_load[expert]))
        if num_ranks == 1:
            excess = 0
        quota[expert, home] = expert_load[expert] - excess
        rank_load[home] -= excess
        stays = excess < expert_load[expert]
        helpers = [rank for rank in np.argsort(rank_load, kind="stable") if rank != home]
        for rank in helpers:
            part = min(excess, capacity - rank_load[rank])
            if part > 0 and (part >= SMALLEST_PART or part == excess):
                quota[expert, rank] += part
                rank_load[rank] += part
                excess -= part
        if excess > 0:  # one that stays in part looks again who has least
            rank = min(sorted(helpers), key=rank_load.__getitem__) if stays else helpers[0]
            quota[expert, rank] += excess
            rank_load[rank] += excess
    return quota
