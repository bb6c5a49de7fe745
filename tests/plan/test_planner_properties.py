"""plan_quota on arbitrary loads: the rules hold, and no plan is worse than doing nothing."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ultraep_lab.imbalance import imbalance
from ultraep_lab.replay import imbalance_floor
from ultraep_serve.plan.checks import check_plan
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

Problem = tuple[np.ndarray, PlanContext]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Loads with many zeros, small and huge counts, over up to 9 ranks of up to 7 experts.

    With a domain size and speeds, or without.
    """
    num_ranks = draw(st.integers(1, 9))
    num_masters = draw(st.integers(1, 7))
    shape = ExpertShape(num_ranks, num_ranks * num_masters, draw(st.integers(0, 3)))
    most = draw(st.sampled_from([1, 20, 5000, (2**31 - 1) // num_ranks]))
    counts = st.one_of(st.just(0), st.integers(0, most))
    loads = draw(arrays(np.int32, (num_ranks, shape.num_logical_experts), elements=counts))
    domain_size = draw(st.one_of(st.none(), st.integers(1, num_ranks)))
    lowest = draw(st.sampled_from([1, 400, 1024]))
    speeds = arrays(np.int64, num_ranks, elements=st.integers(lowest, 1024))
    return loads, PlanContext.of(shape, domain_size, draw(st.one_of(st.none(), speeds)))


@settings(deadline=None, max_examples=300)
@given(problems())
def test_rules_hold(problem: Problem) -> None:
    loads, context = problem
    plans = [plan_quota(loads, context, rank) for rank in range(context.shape.num_ranks)]
    first = plans[0]
    for plan in plans[1:]:
        assert np.array_equal(plan.slot_expert, first.slot_expert)
        assert np.array_equal(plan.quota, first.quota)
    shares = np.stack([plan.share for plan in plans])
    check_plan(loads, context, first.slot_expert, first.quota, shares)


@settings(deadline=None, max_examples=300)
@given(problems())
def test_between_floor_and_identity(problem: Problem) -> None:
    loads, context = problem
    plan = plan_quota(loads, context, 0)
    master_load = loads.sum(0, dtype=np.int64).reshape(context.shape.num_ranks, -1).sum(1)
    assert np.array_equal(context.rank_loads(loads), master_load)
    after = plan.quota.sum(0, dtype=np.int64)
    least, most = context.least_time(master_load), context.busiest_time(master_load)
    assert least <= context.busiest_time(after) <= most
    assert imbalance_floor(loads, context) * (1 - 1e-6) <= imbalance(after, context.speeds)
    if (plan.slot_expert >= 0).any():
        assert imbalance(after, context.speeds) < imbalance(master_load, context.speeds)


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(1, 1024))
def test_equal_speeds_change_nothing(problem: Problem, speed: int) -> None:
    loads, context = problem
    plan = plan_quota(loads, PlanContext.of(context.shape, context.domain_size), 0)
    equal = np.full(context.shape.num_ranks, speed)
    same = plan_quota(loads, replace(context, speeds=equal), 0)
    assert np.array_equal(plan.slot_expert, same.slot_expert)
    assert np.array_equal(plan.quota, same.quota)
    assert np.array_equal(plan.share, same.share)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_the_least_time_is_the_first_that_is_enough(problem: Problem) -> None:
    loads, context = problem
    load, speeds = context.rank_loads(loads), context.speeds
    ranks, size = context.shape.num_ranks, context.domain_size
    domains = [slice(first, first + size) for first in range(0, ranks, size)]
    least = context.least_time(load)

    def is_enough(time: int) -> bool:
        return all((time * speeds[d] // 1024).sum() >= load[d].sum() for d in domains)

    assert is_enough(least)
    assert least == 0 or not is_enough(least - 1)
