"""The exact optimum to hold ``plan_quota`` against."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["least_largest_load"]


def least_largest_load(expert_load: NDArray[np.integer], num_ranks: int, num_slots: int) -> float:
    """Smallest possible largest rank load, as a mixed-integer program.

    Unknowns: moved (E, R), copied (E, R) in {0, 1}, and the largest rank load. A copy takes no
    more than the expert's load; all copies together no more either; a rank holds S copies. Solved
    by HiGHS through SciPy until it is within a thousandth of a proven lower bound.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_experts = expert_load.size
    size = num_experts * num_ranks
    master = np.arange(num_experts) // (num_experts // num_ranks)
    rank_load = np.bincount(master, weights=expert_load)
    per_expert = sparse.kron(sparse.eye(num_experts), np.ones((1, num_ranks)))
    per_rank = sparse.kron(np.ones((1, num_experts)), sparse.eye(num_ranks))
    is_master = sparse.csr_matrix((np.ones(num_experts), (master, np.arange(num_experts))))
    capacity = sparse.diags(np.repeat(expert_load.astype(np.float64), num_ranks))
    left = sparse.bmat(
        [
            [sparse.eye(size), -capacity, None],
            [per_expert, None, None],
            [None, per_rank, None],
            [per_rank - is_master @ per_expert, None, -np.ones((num_ranks, 1))],
        ]
    )
    right = np.concatenate([np.zeros(size), expert_load, np.full(num_ranks, num_slots), -rank_load])
    most = np.concatenate([np.repeat(expert_load, num_ranks), np.ones(size), [rank_load.max()]])
    own = np.arange(num_experts) * num_ranks + master
    most[own] = most[own + size] = 0
    result = milp(
        np.append(np.zeros(2 * size), 1.0),
        constraints=LinearConstraint(left, -np.inf, right),
        bounds=Bounds(0, most),
        integrality=np.concatenate([np.zeros(size), np.ones(size), [0]]),
        options={"mip_rel_gap": 1e-3, "time_limit": 60.0},
    )
    return float(result.fun)
