"""Policy ``lplb``: placement from past loads, split of the batch's own loads by linear programme.

Source: DeepSeek's Linear-Programming-Based Load Balancer, its public README
(https://github.com/deepseek-ai/LPLB): experts are reordered and replicated from statistics with
EPLB, then each batch's tokens are assigned to the copies so that the busiest rank has least. Its
links between ranks follow fixed topologies; here any copy may take any token, so its figures here
are optimistic.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.comparators.eplb import eplb_copies
from ultraep_lab.comparators.placement import Counts, Placement
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import IntArray


def place_lplb(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    """Raises UnsupportedError where SciPy is missing."""
    copies = np.minimum(eplb_copies(history, context), 1)
    return Placement(_split(loads.sum(0), copies), copies)


def _split(expert_load: Counts, copies: IntArray) -> IntArray:
    """Quota (E, R) with the smallest largest rank load, rounded to whole assignments."""
    quota = np.where(copies > 0, expert_load[:, None], 0)
    quota[copies.sum(1) > 1] = 0
    shared = np.flatnonzero((copies.sum(1) > 1) & (expert_load > 0))
    if shared.size:
        experts, ranks = np.nonzero(copies[shared])
        parts = _solve(expert_load[shared], experts, ranks, quota.sum(0))
        # HiGHS may leave a part a rounding error below zero or above its load.
        whole = np.clip(np.floor(parts + 1e-6), 0, expert_load[shared][experts])
        quota[shared[experts], ranks] = whole.astype(np.int64)
        _hand_out_rest(quota, expert_load, copies, shared)
    return quota.astype(np.int32)


def _solve(
    expert_load: Counts, experts: Counts, ranks: Counts, fixed_load: Counts
) -> NDArray[np.float64]:
    """Parts per copy: minimise t with the parts of an expert its load, every rank at most t.

    Args:
        expert_load: (N,) of the experts that have several copies.
        experts, ranks: (C,) index into ``expert_load`` and rank of each of their copies.
        fixed_load: (R,) from experts with one copy.
    """
    optimize = _scipy_optimize()
    num_copies, scale = experts.size, max(1.0, float(expert_load.sum()))
    columns = np.arange(num_copies)  # one per copy, the last is t
    per_expert = np.zeros((expert_load.size, num_copies + 1))
    per_expert[experts, columns] = 1
    per_rank = np.zeros((fixed_load.size, num_copies + 1))
    per_rank[ranks, columns] = 1
    per_rank[:, num_copies] = -1
    result = optimize.linprog(
        np.append(np.zeros(num_copies), 1.0),
        A_ub=per_rank,
        b_ub=-fixed_load / scale,
        A_eq=per_expert,
        b_eq=expert_load / scale,
        method="highs",
    )
    assert result.success, result.message  # always feasible: every copy may take all of its load
    return np.asarray(result.x[:-1], np.float64) * scale


def _hand_out_rest(quota: Counts, expert_load: Counts, copies: IntArray, shared: Counts) -> None:
    """Assign what rounding left over, one by one, to the copy on the least loaded rank.

    Where rounding gave too much, the most loaded copy gives it back. Changes ``quota``.
    """
    rank_load = quota.sum(0)
    for expert in shared:
        holders = np.flatnonzero(copies[expert])
        rest = int(expert_load[expert] - quota[expert].sum())
        while rest != 0:
            if rest > 0:
                rank = holders[rank_load[holders].argmin()]
            else:
                rank = max(holders[quota[expert, holders] > 0], key=lambda r: rank_load[r])
            step = 1 if rest > 0 else -1
            quota[expert, rank] += step
            rank_load[rank] += step
            rest -= step


def _scipy_optimize() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        raise UnsupportedError(
            'policy lplb needs SciPy; run `pip install ".[analysis]"` in a checkout', otherwise=""
        ) from error
    return optimize
