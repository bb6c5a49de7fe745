"""Policy ``eplb-slots``: replicas chosen from past loads, the load split evenly among the copies.

Source: DeepSeek's Expert Parallelism Load Balancer, the global policy of its public README
(https://github.com/deepseek-ai/EPLB) and section 3.4 of the DeepSeek-V3 report
(arXiv 2412.19437): redundant copies go to the experts that are heaviest per copy, then all copies
are packed onto ranks, heaviest first, each on the least loaded rank with room.

Here masters stay and only the S slots of a rank are filled. A second copy of an expert on one rank
would gain nothing and is left out. Where speeds of ranks are known, the least loaded rank is the
one that needs least time for its load; copies of an expert still share its load evenly.
"""

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host._compile import compiled

from ultraep_serve.plan.checks import master_copies
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import IntArray

HISTORY_BATCHES = 8  # past batches that count
Counts = NDArray[np.int64]


def past_copies(history: Counts, context: PlanContext) -> IntArray:
    """Copies (E, R) by the past loads (N, R, E); masters only where there are none yet."""
    shape = context.shape
    weight = history.sum((0, 1))
    if not weight.any():
        return master_copies(shape)
    counts = _replicate(weight, shape.num_ranks * shape.num_replica_slots, context.domain_size)
    return _pack(weight / counts, counts, context)


def _replicate(weight: Counts, num_redundant: int, most: int) -> Counts:
    """Copies per expert (E,): each redundant one to the expert that is heaviest per copy."""
    counts = np.ones(weight.size, np.int64)
    for _ in range(num_redundant):
        per_copy = np.where(counts < most, weight / counts, -1.0)
        heaviest = int(per_copy.argmax())
        if per_copy[heaviest] <= 0:
            break  # what is left was never chosen, or is on every rank
        counts[heaviest] += 1
    return counts


def _pack(per_copy: NDArray[np.float64], counts: Counts, context: PlanContext) -> IntArray:
    """Copies onto ranks, heaviest first, each on the least loaded rank with room for it."""
    shape, speeds = context.shape, context.speeds / context.speeds.max()
    copies = master_copies(shape)
    rank_load = per_copy @ copies
    room = np.full(shape.num_ranks, shape.num_replica_slots)
    domain = np.arange(shape.num_ranks) // context.domain_size
    home = np.arange(counts.size) // shape.num_masters
    order = [(expert, copy) for expert in range(counts.size) for copy in range(1, counts[expert])]
    order.sort(key=lambda item: (-per_copy[item[0]], item[1]))
    for expert, _ in order:
        allowed = (room > 0) & (copies[expert] == 0) & (domain == domain[home[expert]])
        if not allowed.any():
            continue
        rank = int(np.where(allowed, rank_load / speeds, np.inf).argmin())
        copies[expert, rank] = 1
        rank_load[rank] += per_copy[expert]
        room[rank] -= 1
    return copies


@compiled
def even_shares(loads: Counts, copies: IntArray) -> IntArray:
    """Deal each expert's assignments to its copies in turn, whatever rank they come from.

    Dealing goes on where the expert before stopped, so that rounding does not favour any rank.

    Args:
        loads: int64 (R, E), row r is what rank r's own tokens chose.
        copies: int32 (E, R), how many copies of expert e rank r holds.

    Returns:
        int32 (R_source, E, R_target).
    """
    num_ranks, num_experts = loads.shape
    shares = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    holders = np.zeros(copies.sum(), np.int64)  # of one expert's copies
    position = 0
    for expert in range(num_experts):
        count = 0
        for rank in range(num_ranks):
            for _ in range(copies[expert, rank]):
                holders[count] = rank
                count += 1
        for source in range(num_ranks):
            load = loads[source, expert]
            for copy in range(count):
                shares[source, expert, holders[copy]] += load // count
            for extra in range(load % count):
                shares[source, expert, holders[(position + extra) % count]] += 1
            position = (position + load) % (1 << 30)
    return shares
