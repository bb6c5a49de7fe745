"""What a layer's slots hold between batches, where each layer has its own; the same on every rank.

Copies stay until others take their slots, so a batch pays only for those that it needs beside them.
"""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import AVERAGE_SHIFT, FULL_SPEED, TURN, Prices
from ultraep_kernels.host import plan as kernel

from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import ExpertShape, Plan

_MOST = 1 << 40  # assignments of a batch are far fewer


class Residents:
    """The experts in one layer's slots, and the loads by which new ones are chosen."""

    def __init__(self, shape: ExpertShape, layer: int) -> None:
        """``layer`` counts: layers take turns at what only some batches try."""
        self._layer = layer
        self.slot_expert = np.empty((shape.num_ranks, shape.num_slots), np.int32)  # -1 none
        self._average = np.empty(shape.num_logical_experts, np.int64)
        self._changes = 0  # of experts, by what all ranks said last
        self.forget()

    def forget(self) -> None:
        """Trust no slot, and no load of before."""
        self.slot_expert.fill(-1)
        self._average.fill(0)
        self._batches = 0

    def heed(self, changes: int) -> None:
        """Forget where ``changes`` of experts, added up over ranks, are not what they were."""
        if changes != self._changes:
            self._changes = changes
            self.forget()

    def plan(
        self, loads: NDArray[np.int64], context: PlanContext, source_rank: int, prices: Prices
    ) -> Plan:
        """Plan the layer's next batch, ``loads`` (R, E) int64; see ``plan_quota``.

        Raises ValueError where a load is negative or too large.
        """
        load = loads.sum(axis=0)
        before = self._average if self._batches else load << AVERAGE_SHIFT
        self._average = before + load - (before >> AVERAGE_SHIFT)
        self._batches += 1
        return kernel.plan_beside_residents(
            loads,
            (self._average, self.slot_expert),
            source_rank,
            context.domain_size,
            context.speeds,
            prices,
            (self._batches + self._layer) % TURN == 0,
        )

    def take(self, plan: Plan) -> None:
        """Remember what is copied in the batch, which follows ``plan``."""
        is_new = plan.copied >= 0
        self.slot_expert[is_new] = plan.copied[is_new]


def prices_of(costs: IntegerCosts, shape: ExpertShape) -> Prices:
    """What copies and reading cost beside computing."""
    held = shape.num_masters + shape.num_replica_slots
    beside = costs.per_expert_sent, held * costs.per_expert_read
    return Prices(*(min(each * FULL_SPEED // costs.per_assignment, _MOST) for each in beside))
