"""Past loads of every layer, and policy ``eplb`` served live from them.

The loads come from exchanges, so every rank keeps the same history and makes the same plan.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.policies._split import even_shares
from ultraep_serve.policies.eplb import place_eplb_slots
from ultraep_serve.types import ExpertShape, Plan

__all__ = ["LoadHistory"]

HISTORY_BATCHES = 8  # as in `ultraep-serve replay`


class LoadHistory:
    """Expert loads of the last batches, layer by layer."""

    def __init__(self, num_layers: int, batches: int = HISTORY_BATCHES) -> None:
        self._past: list[deque[NDArray[np.int64]]] = [
            deque(maxlen=batches) for _ in range(num_layers)
        ]
        # Compiled, or loaded from disk, now: no batch waits for that.
        even_shares(np.zeros((1, 1), np.int64), np.ones((1, 1), np.int32))

    def add(self, layer: int, loads: NDArray[np.int64]) -> None:
        """``layer`` of one more batch had ``loads`` (R, E)."""
        self._past[layer].append(loads.sum(axis=0))

    def plan_eplb(
        self,
        layer: int,
        loads: NDArray[np.int64],
        shape: ExpertShape,
        source_rank: int,
        domain_size: int,
    ) -> Plan | None:
        """Replicas by past loads, ``loads`` (R, E) split evenly; None where the past asks for none.

        What ``policies.registry`` calls "eplb-slots": masters stay and only slots are filled. It is
        followed even where it makes this batch worse, as a balancer that cannot see it would.
        Copies stay within groups of ``domain_size`` ranks.
        """
        if not self._past[layer]:
            return None
        past = np.stack(self._past[layer])[:, None]  # (N, 1, E): who chose does not matter
        counts = np.ascontiguousarray(loads)
        placement = place_eplb_slots(counts, shape, past, domain_size)
        slot_expert = placement.slot_expert
        if slot_expert is None or (slot_expert < 0).all():
            return None
        share = even_shares(counts, placement.copies)[source_rank]
        return Plan(slot_expert=slot_expert, quota=placement.quota, share=share)
