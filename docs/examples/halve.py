"""A policy of your own: as often as there are slots, the busiest rank gives work away.

ultraep-serve replay TRACE --ep 8 --batch-tokens 2048 --policies quota,docs/examples/halve.py:halve
"""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.plan.context import PlanContext


def halve(
    loads: NDArray[np.int64], context: PlanContext, history: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The busiest rank's hottest expert takes half of the difference to the idlest rank."""
    expert_load = loads.sum(axis=0)
    quota = np.zeros(loads.shape[::-1], np.int64)
    experts = np.arange(expert_load.size)
    quota[experts, experts // context.shape.num_masters] = expert_load
    for _ in range(context.shape.num_replica_slots):
        rank_load = quota.sum(axis=0)
        busiest, idlest = rank_load.argmax(), rank_load.argmin()
        hottest = quota[:, busiest].argmax()
        part = min(quota[hottest, busiest], (rank_load[busiest] - rank_load[idlest]) // 2)
        quota[hottest, busiest] -= part
        quota[hottest, idlest] += part
    return quota
