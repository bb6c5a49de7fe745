"""plan_quota: the edges, the rules and the errors that a caller meets."""

from itertools import pairwise

import numpy as np
import pytest

from ultraep_lab.imbalance import imbalance
from ultraep_serve.plan.checks import check_plan
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape, Plan


def plan_all(loads: np.ndarray, shape: ExpertShape, domain_size: int | None = None) -> Plan:
    """Plan as every rank, check that all agree and that every rule holds; rank 0's plan."""
    context = PlanContext.of(shape, domain_size)
    plans = [plan_quota(loads, context, rank) for rank in range(shape.num_ranks)]
    for one, other in pairwise(plans):
        assert np.array_equal(one.slot_expert, other.slot_expert)
        assert np.array_equal(one.quota, other.quota)
    shares = np.stack([plan.share for plan in plans])
    check_plan(loads, context, plans[0].slot_expert, plans[0].quota, shares)
    return plans[0]


def same_plan(one: Plan, other: Plan) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("slot_expert", "quota", "share")
    )


def test_all_tokens_on_one_expert() -> None:
    shape = ExpertShape(8, 56, 1)  # L = 7 is prime
    loads = np.zeros((8, 56), np.int32)
    loads[:, 9] = 1000
    plan = plan_all(loads, shape)
    assert sorted(plan.slot_expert.ravel().tolist()) == [-1] + [9] * 7
    assert imbalance(plan.quota.sum(0)) <= 1.002


@pytest.mark.parametrize("shape", [ExpertShape(8, 64, 2), ExpertShape(4, 28, 1)])
def test_balanced_load_is_left_alone(shape: ExpertShape) -> None:
    loads = np.full((shape.num_ranks, shape.num_logical_experts), 512, np.int32)
    loads[0, 0] += 3  # less than 1/512 of a rank's load
    assert same_plan(plan_all(loads, shape), plan_quota(loads, PlanContext.of(shape, 1), 0))


def test_known_plan() -> None:
    """Ranks on different machines must agree, so the answer may not depend on the machine."""
    loads = np.array([[40, 10, 10, 0], [20, 10, 0, 10]], np.int32)
    plan = plan_quota(loads, PlanContext.of(ExpertShape(2, 4, 1)), 0)
    assert plan.slot_expert.tolist() == [[-1], [0]]
    assert plan.quota.tolist() == [[30, 30], [20, 0], [0, 10], [0, 10]]
    assert plan.share.tolist() == [[30, 10], [10, 0], [0, 10], [0, 0]]


@pytest.mark.parametrize(
    ("loads", "source_rank", "domain_size", "message"),
    [
        (np.zeros((4, 15), np.int32), 0, None, "loads"),
        (np.zeros((4, 16), np.float32), 0, None, "integers"),
        (np.full((4, 16), -1, np.int32), 0, None, "negative"),
        (np.full((4, 16), 2**30, np.int32), 0, None, "fit a quota"),
        (np.zeros((4, 16), np.int32), 4, None, "source_rank"),
        (np.zeros((4, 16), np.int32), -1, None, "source_rank"),
        (np.zeros((4, 16), np.int32), 0, 0, "domain_size"),
    ],
)
def test_bad_arguments_are_named(
    loads: np.ndarray, source_rank: int, domain_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_quota(loads, PlanContext.of(ExpertShape(4, 16, 2), domain_size), source_rank)


HOT = np.array([[4, 0], [4, 0]], np.int32)  # expert 0 of rank 0 is all there is
GOOD_SLOTS, GOOD_QUOTA = [[-1], [0]], [[4, 4], [0, 0]]
GOOD_SHARES = [[[4, 0], [0, 0]], [[0, 4], [0, 0]]]


@pytest.mark.parametrize(
    ("slots", "quota", "shares", "rule"),
    [
        ([[-1], [1]], GOOD_QUOTA, GOOD_SHARES, "whose master is on its rank"),
        ([[-1], [2]], GOOD_QUOTA, GOOD_SHARES, "logical experts"),
        ([[-1], [-1]], GOOD_QUOTA, GOOD_SHARES, "only on masters and slots"),
        ([[1], [0]], GOOD_QUOTA, GOOD_SHARES, "without quota is empty"),
        (GOOD_SLOTS, [[4, 3], [0, 0]], GOOD_SHARES, "quotas sum to the loads"),
        (GOOD_SLOTS, [[9, -1], [0, 0]], GOOD_SHARES, "not negative"),
        (GOOD_SLOTS, [[5, 3], [0, 0]], GOOD_SHARES, "sum to the quota"),
        (GOOD_SLOTS, GOOD_QUOTA, [[[4, 4], [0, 0]], [[0, 0], [0, 0]]], "sum to the loads over"),
        (GOOD_SLOTS, GOOD_QUOTA, [[[0, 4], [0, 0]], [[4, 0], [0, 0]]], "stay home"),
        ([[-1, -1], [0, 0]], GOOD_QUOTA, GOOD_SHARES, "twice"),
    ],
)
def test_checks_find_broken_plans(slots: list, quota: list, shares: list, rule: str) -> None:
    good = [np.array(array) for array in (GOOD_SLOTS, GOOD_QUOTA, GOOD_SHARES)]
    check_plan(HOT, PlanContext.of(ExpertShape(2, 2, 1)), *good)
    broken = [np.array(array) for array in (slots, quota, shares)]
    with pytest.raises(ValueError, match=rule):
        check_plan(HOT, PlanContext.of(ExpertShape(2, 2, len(slots[0]))), *broken)


def test_checks_find_copies_that_leave_their_domain() -> None:
    good = [np.array(array) for array in (GOOD_SLOTS, GOOD_QUOTA, GOOD_SHARES)]
    with pytest.raises(ValueError, match="domain"):
        check_plan(HOT, PlanContext.of(ExpertShape(2, 2, 1), 1), *good)
