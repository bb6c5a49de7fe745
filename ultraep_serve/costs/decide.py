"""When moving weights pays: integers only, from loads and plan alone, so all ranks agree.

Everything is in picoseconds as Python integers, which neither round nor overflow.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.types import ExpertShape, IntArray

__all__ = [
    "Transfer",
    "overhead_picoseconds",
    "pick_relay",
    "saved_picoseconds",
    "transfer_of",
]


@dataclass(frozen=True)
class Transfer:
    """What replication asks of the busiest rank."""

    busiest_sender: int  # experts sent by one rank
    busiest_receiver: int  # experts received by one rank
    relayed: bool = False

    @property
    def busiest_link(self) -> int:
        """Experts on the busiest link in either direction; links are full duplex."""
        return max(self.busiest_sender, self.busiest_receiver)


def transfer_of(
    slot_expert: IntArray, num_masters: int, parents: NDArray[np.integer] | None = None
) -> Transfer:
    """The transfer of ``slot_expert`` (R, S), -1 empty.

    ``parents`` (R, S), as planned for relays: -1 the master sends, else the slot that does,
    ``rank * S + slot``.
    """
    ranks, slots = np.nonzero(slot_expert >= 0)
    if not ranks.size:
        return Transfer(0, 0)
    num_ranks, num_slots = slot_expert.shape
    senders = slot_expert[ranks, slots].astype(np.int64) // num_masters
    relayed = False
    if parents is not None:
        parent = parents[ranks, slots].astype(np.int64)
        senders = np.where(parent >= 0, parent // num_slots, senders)
        relayed = bool((parent >= 0).any())
    return Transfer(
        busiest_sender=int(np.bincount(senders, minlength=num_ranks).max()),
        busiest_receiver=int(np.bincount(ranks, minlength=num_ranks).max()),
        relayed=relayed,
    )


def saved_picoseconds(
    before: int, after: int, shape: ExpertShape, transfer: Transfer, costs: IntegerCosts
) -> int:
    """Time that following a plan saves, once loads are known; negative where it costs.

    ``before`` and ``after`` are the assignments of the busiest rank. Only the slots that the
    transfer fills are read beside the masters.
    """
    masters = shape.num_masters
    held = masters + transfer.busiest_receiver
    unbalanced = max(before * costs.per_assignment, masters * costs.per_expert_read)
    balanced = max(after * costs.per_assignment, held * costs.per_expert_read)
    return unbalanced - balanced - overhead_picoseconds(transfer, costs)


def overhead_picoseconds(transfer: Transfer, costs: IntegerCosts) -> int:
    """Planning and the exposed transfer of one layer; the exchange is spent either way."""
    moved = transfer.busiest_link * costs.per_expert_sent
    return costs.plan + moved + (costs.per_relay_hop if transfer.relayed else 0)


def pick_relay(direct: Transfer, relayed: Transfer, costs: IntegerCosts) -> bool:
    """Whether the relayed transfer takes less time than the direct one."""
    return overhead_picoseconds(relayed, costs) < overhead_picoseconds(direct, costs)
