"""quota or copies -> shares (R, E, R) of all source ranks at once; compiled."""

import numpy as np

from ultraep_serve.policies._compile import compiled
from ultraep_serve.policies.placement import Counts
from ultraep_serve.types import IntArray

__all__ = ["even_shares", "home_first_shares"]


@compiled
def home_first_shares(loads: Counts, quota: IntArray) -> IntArray:
    """Keep tokens on their own rank where the quota allows, then fill targets in order.

    The same split as ``plan_quota`` gives rank by rank, for any placement: sources are laid out
    from rank ``expert % R`` on, targets from rank 0.

    Args:
        loads: int64 (R, E), row r is what rank r's own tokens chose.
        quota: int32 (E, R), rows sum to the loads' columns.

    Returns:
        int32 (R_source, E, R_target).
    """
    num_ranks, num_experts = loads.shape
    shares = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    left = np.zeros(num_ranks, np.int64)
    for expert in range(num_experts):
        for rank in range(num_ranks):
            home = min(loads[rank, expert], quota[expert, rank])
            shares[rank, expert, rank] = home
            left[rank] = quota[expert, rank] - home
        target = 0
        for step in range(num_ranks):
            source = (expert + step) % num_ranks
            todo = loads[source, expert] - shares[source, expert, source]
            while todo > 0 and target < num_ranks:
                part = min(todo, left[target])
                shares[source, expert, target] += part
                left[target] -= part
                todo -= part
                if left[target] == 0:
                    target += 1
    return shares


@compiled
def even_shares(loads: Counts, copies: IntArray) -> IntArray:
    """Deal each expert's assignments to its copies in turn, whatever rank they come from.

    Dealing goes on where the expert before stopped, so the rounding does not favour any rank.

    Args:
        loads: int64 (R, E), row r is what rank r's own tokens chose.
        copies: int32 (E, R), 1 where rank r holds expert e.

    Returns:
        int32 (R_source, E, R_target).
    """
    num_ranks, num_experts = loads.shape
    shares = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    holders = np.zeros(num_ranks, np.int64)
    position = 0
    for expert in range(num_experts):
        count = 0
        for rank in range(num_ranks):
            if copies[expert, rank] > 0:
                holders[count] = rank
                count += 1
        for source in range(num_ranks):
            load = loads[source, expert]
            for copy in range(count):
                shares[source, expert, holders[copy]] = load // count
            for extra in range(load % count):
                shares[source, expert, holders[(position + extra) % count]] += 1
            position = (position + load) % (1 << 30)
    return shares
