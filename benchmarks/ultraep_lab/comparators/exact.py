"""Policy ``exact``: every rank computes the same number of assignments, give or take one.

Source: MoonEP (https://github.com/MoonshotAI/MoonEP) as described in the Kimi K3 report
(arXiv 2607.24653, section 5.2.1 and appendix E): each rank gets exactly tokens x top-k, by copying
experts as the batch needs; E / R slots per rank always suffice, because a rank is filled by one
other rank. Here: the rank that lacks most takes what it lacks from the rank with the largest
excess, the donor's largest experts first. That takes at most R - 1 steps, and no rank receives
before it has given its whole excess.

Slots are not limited here; ``Placement.slots_needed`` says how many it took. Weights move within
the batch, hence within a domain: there the ranks of a domain are equal.
"""

import numpy as np

from ultraep_lab.comparators.placement import Counts, Placement, of_quota
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.copies import master_copies

__all__ = ["place_exact"]


def place_exact(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    """``history``, speeds and the number of slots are not used."""
    quota = master_copies(context.shape).astype(np.int64) * loads.sum(0)[:, None]
    for domain in context.domains:
        _level(quota[:, domain])
    return of_quota(quota, context.shape)


def _level(quota: Counts) -> None:
    """Make the columns of ``quota`` (E, D), a view, sum to the same number, give or take one."""
    rank_load = quota.sum(0)
    target = np.full(rank_load.size, rank_load.sum() // rank_load.size)
    # The remainder stays on the ranks that have most, which moves least.
    target[np.argsort(-rank_load, kind="stable")[: rank_load.sum() % rank_load.size]] += 1
    while (rank_load != target).any():
        lacking = int((target - rank_load).argmax())
        donor = int((rank_load - target).argmax())
        lack = int(target[lacking] - rank_load[lacking])
        rank_load[lacking] += lack
        rank_load[donor] -= lack
        for expert in np.argsort(-quota[:, donor], kind="stable"):
            part = min(lack, int(quota[expert, donor]))
            quota[expert, donor] -= part
            quota[expert, lacking] += part
            lack -= part
            if lack == 0:
                break
