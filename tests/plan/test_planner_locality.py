"""Tokens stay at home where the quotas allow it: held against a linear programme."""

import numpy as np
import pytest

from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

optimize = pytest.importorskip("scipy.optimize", reason="needs SciPy: pip install scipy")


def least_all_gather_rows(supply: np.ndarray, demand: np.ndarray) -> float:
    """Fewest assignments of one expert that must leave their rank: a transport problem.

    ``supply`` (R,) by source rank, ``demand`` (R,) by target rank, with the same sum.
    """
    ranks = supply.size
    cost = 1.0 - np.eye(ranks)
    rows = np.kron(np.eye(ranks), np.ones(ranks))
    columns = np.kron(np.ones(ranks), np.eye(ranks))
    result = optimize.linprog(
        cost.reshape(-1), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([supply, demand])
    )
    assert result.success
    return float(result.fun)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_no_more_tokens_cross_ranks_than_the_quotas_force(num_slots: int, seed: int) -> None:
    shape = ExpertShape(num_ranks=4, num_logical_experts=12, num_replica_slots=num_slots)
    chooser = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, 13) ** 1.2
    loads = chooser.poisson(200 * popularity, size=(4, 12)).astype(np.int32)
    plans = [plan_quota(loads, PlanContext.of(shape), rank) for rank in range(4)]
    moved = sum(
        int(plan.share.sum() - plan.share[:, rank].sum()) for rank, plan in enumerate(plans)
    )
    least = sum(least_all_gather_rows(loads[:, e], plans[0].quota[e]) for e in range(12))
    assert moved == round(least)
