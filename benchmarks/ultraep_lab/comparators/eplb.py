"""Policy ``eplb``: all experts placed by past loads, as the engines' own balancers place them.

Source: DeepSeek's Expert Parallelism Load Balancer, the global policy of its public README
(https://github.com/deepseek-ai/EPLB): each redundant copy goes to the expert that is heaviest per
copy; then all copies are packed onto ranks, heaviest first, each on the lightest rank with room.
vLLM's default policy and SGLang's ``deepseek`` are that algorithm. A rank may get two copies of an
expert, whose load is split evenly among all copies, so that such a rank computes two parts of it.
"""

import numpy as np

from ultraep_lab.comparators.placement import Counts
from ultraep_serve.plan.checks import master_copies
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import IntArray


def eplb_copies(history: Counts, context: PlanContext) -> IntArray:
    """How many copies of expert e rank r holds, int32 (E, R), by past loads (N, R, E).

    Every expert may move, whatever its domain and the speed of ranks; there are E / R + S copies on
    each rank. Without past loads, masters only.
    """
    shape, weight = context.shape, history.sum((0, 1))
    if not weight.any():
        return master_copies(shape)
    counts = np.ones(weight.size, np.int64)
    experts = list(range(weight.size))  # of all copies, the first of each expert before the others
    for _ in range(shape.num_ranks * shape.num_replica_slots):
        heaviest = int((weight / counts).argmax())
        counts[heaviest] += 1
        experts.append(heaviest)
    copies = np.zeros((weight.size, shape.num_ranks), np.int32)
    if shape.num_local == 1:
        copies[experts, np.arange(shape.num_ranks)] = 1
        return copies
    per_copy = (weight / counts)[experts]
    rank_load, room = np.zeros(shape.num_ranks), np.full(shape.num_ranks, shape.num_local)
    for place in np.argsort(-per_copy, kind="stable"):
        rank = int(np.where(room > 0, rank_load, np.inf).argmin())
        copies[experts[place], rank] += 1
        rank_load[rank] += per_copy[place]
        room[rank] -= 1
    return copies
