"""Layer and prefill times from loads: what the cost model says before anything runs."""

from dataclasses import dataclass

from ultraep_serve.costs.decide import Transfer
from ultraep_serve.costs.estimate import Estimate
from ultraep_serve.costs.model import CostModel
from ultraep_serve.costs.shapes import ModelShape

__all__ = ["IDLE", "Prefill", "layer_seconds", "prefill_seconds"]

IDLE = Transfer(0, 0)


def layer_seconds(
    model: CostModel,
    busiest_assignments: float,
    rank_tokens: float,
    held_experts: int,
    *,
    transfer: Transfer = IDLE,
    weighed: bool = False,
) -> float:
    """Seconds of one MoE layer, whose busiest rank has ``busiest_assignments``.

    ``rank_tokens`` are one rank's share of the batch, ``held_experts`` those whose weights a rank
    reads, slots included; ``weighed`` adds the exchange of loads, a ``transfer`` of anything adds
    planning and moving.
    """
    seconds = model.base_seconds + model.other_seconds_per_token * rank_tokens
    seconds += max(
        model.seconds_per_assignment * busiest_assignments,
        model.read_seconds_per_expert * held_experts,
    )
    seconds += model.exchange_seconds if weighed else 0.0
    if transfer.busiest_link:
        seconds += model.plan_seconds
        seconds += transfer.busiest_link * model.seconds_per_sent_expert
        seconds += model.relay_hop_seconds if transfer.relayed else 0.0
    return seconds


@dataclass(frozen=True)
class Prefill:
    """A batch as far as its time depends on balance: the same in every MoE layer."""

    tokens: float  # over all ranks
    num_ranks: int
    imbalance: float  # max/mean of assignments over ranks
    slots: int = 0  # filled, on the rank that fills most
    transfer: Transfer = IDLE
    weighed: bool = False  # loads are exchanged


def prefill_seconds(shape: ModelShape, estimate: Estimate, prefill: Prefill) -> float:
    """Seconds through all layers of ``shape`` for one batch."""
    rank_tokens = prefill.tokens / prefill.num_ranks
    layer = layer_seconds(
        estimate.costs,
        prefill.imbalance * rank_tokens * shape.experts_per_token,
        rank_tokens,
        -(-shape.num_experts // prefill.num_ranks) + prefill.slots,
        transfer=prefill.transfer,
        weighed=prefill.weighed,
    )
    dense = shape.num_dense_layers * estimate.dense_seconds_per_token * rank_tokens
    return shape.num_moe_layers * layer + dense
