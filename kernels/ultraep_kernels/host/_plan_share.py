"""slots and loads -> quota (E, R) and one source rank's share (E, R); compiled.

Tokens stay at home where the quota allows; what is left of each expert is a transport problem
whose supplies (source ranks) and demands (target ranks) are laid end to end on one line. A source
sends to a target as much as their intervals overlap (the north-west corner rule), so every source
finds its own slice without computing the others'. Twin: ``device._plan_finish``.
"""

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import IntArray
from ultraep_kernels.host._compile import compiled

Counts = NDArray[np.int64]


@compiled
def count_experts(loads: Counts) -> Counts:
    """int64 (R, E) -> int64 (E,): assignments per expert; -1 in the first where one is negative."""
    total = np.zeros(loads.shape[1], np.int64)
    lowest = 0
    for rank in range(loads.shape[0]):
        for expert in range(loads.shape[1]):
            total[expert] += loads[rank, expert]
            lowest = min(lowest, loads[rank, expert])
    if lowest < 0:
        total[0] = -1
    return total


@compiled
def split_quota(
    loads: Counts, expert_load: Counts, slot_expert: IntArray, slot_quota: Counts, source: int
) -> tuple[IntArray, IntArray]:
    """What every rank computes, and what ``source`` sends where: quota and share, int32 (E, R).

    ``expert_load`` (E,) are the column sums of ``loads`` (R, E); ``slot_quota`` (R, S) is what each
    slot of ``slot_expert`` (R, S), -1 empty, computes.
    """
    num_ranks, num_experts = loads.shape
    num_masters = num_experts // num_ranks
    quota = np.zeros((num_experts, num_ranks), np.int32)
    share = np.zeros((num_experts, num_ranks), np.int32)
    for expert in range(num_experts):
        quota[expert, expert // num_masters] = expert_load[expert]
        share[expert, expert // num_masters] = loads[source, expert]
    for rank in range(num_ranks):
        for slot in range(slot_expert.shape[1]):
            expert = slot_expert[rank, slot]
            if expert >= 0:
                quota[expert, rank] = slot_quota[rank, slot]
                quota[expert, expert // num_masters] -= slot_quota[rank, slot]
    done = np.zeros(num_experts, np.bool_)
    for rank in range(num_ranks):
        for slot in range(slot_expert.shape[1]):
            expert = slot_expert[rank, slot]
            if expert >= 0 and not done[expert]:
                done[expert] = True
                _spread(loads, quota, expert, source, share)
    return quota, share


@compiled
def _spread(loads: Counts, quota: IntArray, expert: int, source: int, share: IntArray) -> None:
    """Split what ``source`` chose of one replicated expert over the ranks that compute it.

    Sources are laid out from rank ``expert % R`` on, so that the corner rule does not send the
    first ranks' tokens of every expert to the same few targets.
    """
    num_ranks = loads.shape[0]
    share[expert, expert // (loads.shape[1] // num_ranks)] = 0
    home = min(loads[source, expert], quota[expert, source])
    share[expert, source] = home
    start = 0
    rank = expert % num_ranks
    while rank != source:
        start += max(0, loads[rank, expert] - quota[expert, rank])
        rank = rank + 1 if rank + 1 < num_ranks else 0
    end = start + loads[source, expert] - home
    position = 0
    for target in range(num_ranks):
        if position >= end:
            return
        demand = quota[expert, target] - loads[target, expert]
        if demand > 0:
            overlap = min(end, position + demand) - max(start, position)
            if overlap > 0:
                share[expert, target] = overlap
            position += demand
