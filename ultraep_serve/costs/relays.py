"""Which ranks relay experts to others: the published rule, where it saves time."""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.costs.model import IntegerCosts, pick_relay, transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import IntArray

__all__ = ["chosen_parents"]


def chosen_parents(
    slot_expert: IntArray, context: PlanContext, mode: str, costs: IntegerCosts | None
) -> NDArray[np.int64]:
    """Who sends each slot its weights (R, S): the published rule, where the costs agree.

    ``mode`` as of ``relay_parents``; where no ``costs`` are known the rule decides alone.
    """
    masters = context.shape.num_masters
    parents: NDArray[np.int64] = relay_parents(slot_expert, masters, mode, context.domain_size)
    if mode == "auto" and costs is not None and (parents >= 0).any():
        direct = transfer_of(slot_expert, masters)
        relayed = transfer_of(slot_expert, masters, parents)
        if not pick_relay(direct, relayed, costs):
            return np.full_like(parents, -1)
    return parents
