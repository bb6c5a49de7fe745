"""Other planners to hold ``plan_quota`` against: a plain greedy one, and the exact optimum."""

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.types import IntArray

__all__ = ["greedy_plan", "least_largest_load"]


def greedy_plan(
    expert_load: NDArray[np.integer], num_ranks: int, num_slots: int
) -> tuple[IntArray, NDArray[np.int64]]:
    """Quotas by the greedy rule with rising thresholds: slots (R, S), -1 empty, rank loads (R,).

    At each step the rank with the largest excess over the threshold gives from its expert with the
    largest remaining quota to the rank with the most room and a free slot. The first threshold at
    which no excess is left wins. Quota planning by a search over thresholds is UltraEP's (arXiv
    2606.04101); this order of steps is a stronger one than published there.
    """
    rank_load = expert_load.reshape(num_ranks, -1).sum(1).astype(np.int64)
    mean, largest = -(-int(rank_load.sum()) // num_ranks), int(rank_load.max())
    step = max(1, mean // 512)
    for threshold in range(mean, largest, step):
        slots, after = _greedy_attempt(expert_load, rank_load, num_slots, threshold)
        if after.max() <= threshold:
            return slots, after
    return np.full((num_ranks, num_slots), -1, np.int32), rank_load


def _greedy_attempt(
    expert_load: NDArray[np.integer],
    rank_load: NDArray[np.int64],
    num_slots: int,
    threshold: int,
) -> tuple[IntArray, NDArray[np.int64]]:
    num_ranks, num_masters = rank_load.size, expert_load.size // rank_load.size
    left = expert_load.astype(np.int64).copy()  # still computed by the master
    load = rank_load.copy()
    slots = np.full((num_ranks, num_slots), -1, np.int32)
    used = np.zeros(num_ranks, np.int64)
    while (donor := int(load.argmax())) >= 0 and load[donor] > threshold:
        own = slice(donor * num_masters, (donor + 1) * num_masters)
        expert = donor * num_masters + int(left[own].argmax())
        room = np.where((used < num_slots) & (slots != expert).all(1), threshold - load, 0)
        target = int(room.argmax())
        moved = min(int(room[target]), int(left[expert]), int(load[donor]) - threshold)
        if moved <= 0:
            break
        slots[target, used[target]] = expert
        used[target] += 1
        left[expert] -= moved
        load[donor] -= moved
        load[target] += moved
    return slots, load


def least_largest_load(
    expert_load: NDArray[np.integer],
    num_ranks: int,
    num_slots: int,
    speeds: NDArray[np.integer] | None = None,
) -> tuple[float, float]:
    """Smallest possible largest rank load, as a mixed-integer program, and a proven lower bound.

    With ``speeds`` (R,) both are of load over speed. Unknowns: moved (E, R), copied (E, R) in
    {0, 1}, and the largest rank load. A copy takes no
    more than the expert's load; all copies together no more either; a rank holds S copies. Solved
    by HiGHS through SciPy until the two figures are within a thousandth.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_experts = expert_load.size
    size = num_experts * num_ranks
    master = np.arange(num_experts) // (num_experts // num_ranks)
    rank_load = np.bincount(master, weights=expert_load)
    speed = np.ones(num_ranks) if speeds is None else speeds
    per_expert = sparse.kron(sparse.eye(num_experts), np.ones((1, num_ranks)))
    per_rank = sparse.kron(np.ones((1, num_experts)), sparse.eye(num_ranks))
    is_master = sparse.csr_matrix((np.ones(num_experts), (master, np.arange(num_experts))))
    capacity = sparse.diags(np.repeat(expert_load.astype(np.float64), num_ranks))
    left = sparse.bmat(
        [
            [sparse.eye(size), -capacity, None],
            [per_expert, None, None],
            [None, per_rank, None],
            [per_rank - is_master @ per_expert, None, -speed[:, None]],
        ]
    )
    right = np.concatenate([np.zeros(size), expert_load, np.full(num_ranks, num_slots), -rank_load])
    most = np.concatenate(
        [np.repeat(expert_load, num_ranks), np.ones(size), [(rank_load / speed).max()]]
    )
    own = np.arange(num_experts) * num_ranks + master
    most[own] = most[own + size] = 0
    result = milp(
        np.append(np.zeros(2 * size), 1.0),
        constraints=LinearConstraint(left, -np.inf, right),
        bounds=Bounds(0, most),
        integrality=np.concatenate([np.zeros(size), np.ones(size), [0]]),
        options={"mip_rel_gap": 1e-3, "time_limit": 60.0},
    )
    return float(result.fun), float(result.mip_dual_bound)
