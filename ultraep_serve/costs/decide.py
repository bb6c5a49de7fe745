"""When moving weights pays: integers only, from loads and plan alone, so all ranks agree.

Everything is in picoseconds as Python integers, which neither round nor overflow.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.costs.model import CostModel, IntegerCosts
from ultraep_serve.types import ExpertShape, IntArray, Plan

__all__ = [
    "Transfer",
    "break_even_tokens",
    "pick_relay",
    "residual_imbalance",
    "saved_picoseconds",
    "transfer_of",
    "worth_it",
]

MOST_TOKENS = 1 << 40  # a break-even above it is none


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


def worth_it(
    loads: NDArray[np.integer],
    plan: Plan,
    model: CostModel,
    parents: NDArray[np.integer] | None = None,
) -> bool:
    """Whether ``plan`` for ``loads`` (R, E) saves more than it costs; no tie goes to moving.

    A pure function of what every rank holds alike (slots and quotas, not shares), so every rank
    comes to the same answer without a message.
    """
    num_ranks, num_experts = loads.shape
    shape = ExpertShape(num_ranks, num_experts, plan.slot_expert.shape[1])
    by_master = loads.sum(0, dtype=np.int64).reshape(num_ranks, shape.num_masters).sum(1)
    return (
        saved_picoseconds(
            int(by_master.max()),
            int(plan.quota.sum(0, dtype=np.int64).max()),
            shape,
            transfer_of(plan.slot_expert, shape.num_masters, parents),
            model.integer_costs(),
        )
        > 0
    )


def pick_relay(direct: Transfer, relayed: Transfer, costs: IntegerCosts) -> bool:
    """Whether the relayed transfer takes less time than the direct one."""
    return overhead_picoseconds(relayed, costs) < overhead_picoseconds(direct, costs)


def residual_imbalance(model: CostModel, mean_assignments: float, sent_experts: int = 1) -> float:
    """The imbalance at or below which no plan can be worth it, so that none need be made.

    With ``mean_assignments`` per rank even a perfect balance saves no more than the busiest rank's
    excess over the mean, and costs at least planning and ``sent_experts`` on one link. Infinite
    for an empty batch.
    """
    if mean_assignments <= 0:
        return float("inf")
    costs = model.integer_costs()
    overhead = overhead_picoseconds(Transfer(sent_experts, sent_experts), costs)
    return 1 + overhead / (costs.per_assignment * mean_assignments)


def break_even_tokens(
    model: CostModel,
    shape: ExpertShape,
    experts_per_token: int,
    before: float,
    after: float,
    transfer: Transfer,
) -> int | None:
    """The smallest batch, in tokens over all ranks, from which on balancing saves time.

    Smaller ones need not even exchange loads. Imbalances ``before`` and ``after`` are taken not to
    depend on the batch (in truth small batches are less even). None where no batch is large enough.
    """
    if before <= after:
        return None
    costs = model.integer_costs()

    def saves(tokens: int) -> bool:
        mean = tokens * experts_per_token / shape.num_ranks
        return (
            saved_picoseconds(round(mean * before), round(mean * after), shape, transfer, costs)
            > costs.exchange
        )

    low, high = 0, 1
    while not saves(high):
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saves(middle) else (middle, high)
    return high
