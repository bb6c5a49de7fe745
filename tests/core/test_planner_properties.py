"""plan_quota on arbitrary loads: the rules hold, and no plan is worse than doing nothing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ultraep_serve.planner.checks import check_plan, imbalance_floor
from ultraep_serve.planner.quota import plan_quota
from ultraep_serve.types import ExpertShape, imbalance


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, ExpertShape, int | None]:
    """Loads with many zeros, small and huge counts, over up to 9 ranks of up to 7 experts."""
    num_ranks = draw(st.integers(1, 9))
    num_masters = draw(st.integers(1, 7))
    shape = ExpertShape(num_ranks, num_ranks * num_masters, draw(st.integers(0, 3)))
    most = draw(st.sampled_from([1, 20, 5000, (2**31 - 1) // num_ranks]))
    counts = st.one_of(st.just(0), st.integers(0, most))
    loads = draw(arrays(np.int32, (num_ranks, shape.num_logical_experts), elements=counts))
    domain_size = draw(st.one_of(st.none(), st.integers(1, num_ranks)))
    return loads, shape, domain_size


@settings(deadline=None, max_examples=300)
@given(problems())
def test_rules_hold(problem: tuple[np.ndarray, ExpertShape, int | None]) -> None:
    loads, shape, domain_size = problem
    plans = [
        plan_quota(loads, shape, rank, domain_size=domain_size) for rank in range(shape.num_ranks)
    ]
    first = plans[0]
    for plan in plans[1:]:
        assert np.array_equal(plan.slot_expert, first.slot_expert)
        assert np.array_equal(plan.quota, first.quota)
    shares = np.stack([plan.share for plan in plans])
    check_plan(loads, shape, first.slot_expert, first.quota, shares, domain_size=domain_size)


@settings(deadline=None, max_examples=300)
@given(problems())
def test_between_floor_and_identity(problem: tuple[np.ndarray, ExpertShape, int | None]) -> None:
    loads, shape, domain_size = problem
    plan = plan_quota(loads, shape, 0, domain_size=domain_size)
    master_load = loads.sum(0, dtype=np.int64).reshape(shape.num_ranks, -1).sum(1)
    after = plan.quota.sum(0, dtype=np.int64)
    floor = imbalance_floor(loads, domain_size=domain_size) * master_load.mean()
    assert floor - 1e-6 * floor <= after.max() <= master_load.max()
    if (plan.slot_expert >= 0).any():
        assert imbalance(after) < imbalance(master_load)
