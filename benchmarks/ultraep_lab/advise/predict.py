"""Layer and prefill times from loads: what the cost model says before anything runs."""

from dataclasses import dataclass

from ultraep_serve.costs.hardware import Estimate
from ultraep_serve.costs.model import CostModel, Transfer, overhead_picoseconds, saved_picoseconds
from ultraep_serve.costs.shapes import ModelShape
from ultraep_serve.types import ExpertShape

__all__ = [
    "NOTHING_MOVED",
    "Prefill",
    "break_even_tokens",
    "layer_seconds",
    "prefill_seconds",
    "residual_imbalance",
]

NOTHING_MOVED = Transfer(0, 0)
MOST_TOKENS = 1 << 40  # a break-even above it is none


def layer_seconds(
    model: CostModel,
    busiest_assignments: float,
    rank_tokens: float,
    held_experts: int,
    *,
    transfer: Transfer = NOTHING_MOVED,
    link_experts: float | None = None,
    exchanged: bool = False,
) -> float:
    """Seconds of one MoE layer.

    Args:
        model: the costs.
        busiest_assignments: of the busiest rank; where speeds differ its time as that of so many.
        rank_tokens: one rank's share of the batch.
        held_experts: those whose weights a rank reads, slots included.
        transfer: if it moves anything, planning and moving are added.
        link_experts: where links are not equally fast, how many experts a link of usual speed moves
            while the one that is busy longest is; by default those on the busiest link.
        exchanged: whether loads are exchanged.
    """
    seconds = model.base_seconds + model.other_seconds_per_token * rank_tokens
    seconds += max(
        model.seconds_per_assignment * busiest_assignments,
        model.read_seconds_per_expert * held_experts,
    )
    seconds += model.exchange_seconds if exchanged else 0.0
    if transfer.busiest_link:
        seconds += model.plan_seconds
        moved = transfer.busiest_link if link_experts is None else link_experts
        seconds += moved * model.seconds_per_sent_expert
        seconds += model.relay_hop_seconds if transfer.relayed else 0.0
    return seconds


@dataclass(frozen=True)
class Prefill:
    """A batch as far as its time depends on balance: the same in every MoE layer."""

    tokens: float  # over all ranks
    num_ranks: int
    imbalance: float  # max/mean of assignments over ranks
    slots: int = 0  # filled, on the rank that fills most
    transfer: Transfer = NOTHING_MOVED
    exchanged: bool = False  # loads are exchanged


def prefill_seconds(shape: ModelShape, estimate: Estimate, prefill: Prefill) -> float:
    """Seconds through all layers of ``shape`` for one batch."""
    rank_tokens = prefill.tokens / prefill.num_ranks
    layer = layer_seconds(
        estimate.costs,
        prefill.imbalance * rank_tokens * shape.experts_per_token,
        rank_tokens,
        -(-shape.num_experts // prefill.num_ranks) + prefill.slots,
        transfer=prefill.transfer,
        exchanged=prefill.exchanged,
    )
    dense = shape.num_dense_layers * estimate.dense_seconds_per_token * rank_tokens
    return shape.num_moe_layers * layer + dense


def residual_imbalance(model: CostModel, mean_assignments: float) -> float:
    """The imbalance at or below which no plan can save time, so that none is made.

    With ``mean_assignments`` per rank even a perfect balance saves no more than the busiest rank's
    excess over the mean, and costs at least planning and one expert on one link. Infinite for an
    empty batch.
    """
    if mean_assignments <= 0:
        return float("inf")
    costs = model.integer_costs()
    overhead = overhead_picoseconds(Transfer(1, 1), costs)
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
        most, least = round(mean * before), round(mean * after)
        return saved_picoseconds(most, least, shape, transfer, costs) > costs.exchange

    low, high = 0, 1
    while not saves(high):
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if saves(middle) else (middle, high)
    return high
