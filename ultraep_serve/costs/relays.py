"""Which ranks relay experts to others: by the published rule, where it saves time."""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import MIN_FAN_OUT_SAVED
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.types import IntArray

__all__ = ["chosen_parents", "least_saved"]

_MOST = 1 << 30  # more than all ranks' slots, and a number of 32 bits


def least_saved(costs: IntegerCosts | None) -> int:
    """How many experts relays must spare the busiest link, to save more than a hop takes.

    This is the published rule's number where no ``costs`` are known.
    """
    if costs is None:
        return MIN_FAN_OUT_SAVED
    if costs.per_expert_sent == 0:
        return _MOST
    return min(costs.per_relay_hop // costs.per_expert_sent + 1, _MOST)


def chosen_parents(
    slot_expert: IntArray, num_masters: int, mode: str, costs: IntegerCosts | None
) -> NDArray[np.int64]:
    """Who sends each slot its weights (R, S), as ``relay_parents`` where the costs decide."""
    parents: NDArray[np.int64] = relay_parents(slot_expert, num_masters, mode, least_saved(costs))
    return parents
