"""Each policy on loads small enough to work out by hand, and all of them under the same rules."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.ids import zipf_loads
from ultraep_lab.comparators import POLICIES, policy_function
from ultraep_serve.plan.checks import check_plan
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

EXACT_LOADS = ("off", "quota", "llep")  # masters stay, tokens stay home first


@pytest.fixture(autouse=True)
def _scipy(request: pytest.FixtureRequest) -> None:
    if "lplb" in request.node.name:
        pytest.importorskip("scipy")


def loads_of(expert_load: list[int], num_ranks: int) -> np.ndarray:
    """Loads (R, E) where all tokens come from rank 0."""
    loads = np.zeros((num_ranks, len(expert_load)), np.int32)
    loads[0] = expert_load
    return loads


def no_history(loads: np.ndarray) -> np.ndarray:
    return np.zeros((0, *loads.shape), np.int32)


def rank_loads(name: str, loads: np.ndarray, num_slots: int, past: np.ndarray) -> list[int]:
    context = PlanContext.of(ExpertShape(*loads.shape, num_slots))
    return policy_function(name)(loads, context, past).quota.sum(0).tolist()


def check_rules(name: str, loads: np.ndarray, shape: ExpertShape, domain: int | None) -> None:
    """What holds for every policy, and for those that keep masters all rules of a plan."""
    history = np.stack([loads[::-1], loads])
    policy = POLICIES[name]
    context = PlanContext.of(shape, domain, 1024 - 100 * np.arange(shape.num_ranks) % 700)
    plan = policy(loads, context, history)
    policy.check(loads, context, plan)
    assert plan.shares is not None
    assert (plan.shares >= 0).all()
    assert np.array_equal(plan.shares.sum(0), plan.quota)
    assert np.array_equal(plan.shares.sum(2), loads)
    placement = policy.place(loads.astype(np.int64), context, history)
    if name != "ideal":
        assert (plan.quota[placement.copies == 0] == 0).all()
        assert (placement.copies.sum(1) >= 1).all()
    if name != "llep":
        assert placement.slots_needed <= shape.num_replica_slots
    if name in EXACT_LOADS:
        assert plan.slot_expert is not None
        wide = ExpertShape(shape.num_ranks, shape.num_logical_experts, plan.slot_expert.shape[1])
        wide_context = replace(context, shape=wide)
        check_plan(loads, wide_context, plan.slot_expert, plan.quota, plan.shares)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("shape", "domain"),
    [
        (ExpertShape(4, 28, 1), None),  # a prime number of masters per rank
        (ExpertShape(8, 64, 2), 4),
        (ExpertShape(6, 12, 2), 4),  # the last domain is smaller
        (ExpertShape(1, 8, 2), None),
        (ExpertShape(4, 8, 0), None),
        (ExpertShape(3, 3, 4), None),  # more slots than other experts
    ],
)
def test_rules(name: str, shape: ExpertShape, domain: int | None) -> None:
    check_rules(name, zipf_loads(shape, 1.0, 0, 2048), shape, domain)


def test_quota_is_the_plan_that_is_served() -> None:
    shape = ExpertShape(8, 64, 2)
    loads = zipf_loads(shape, 1.0, 1, 2048)
    context = PlanContext.of(shape, 4)
    plan = POLICIES["quota"](loads, context, no_history(loads))
    assert plan.shares is not None
    for rank in range(shape.num_ranks):
        served = plan_quota(loads, context, rank)
        assert np.array_equal(plan.slot_expert, served.slot_expert)
        assert np.array_equal(plan.quota, served.quota)
        assert np.array_equal(plan.shares[rank], served.share)


def test_kept_replicas_go_by_proportion() -> None:
    """Half of expert 0 was planned on rank 1, so half of it goes there, however much there is."""
    policy, shape = policy_function("quota-every-8"), ExpertShape(2, 4, 1)
    assert policy.refreshed_every == 8
    planned, now = loads_of([60, 0, 0, 0], 2), loads_of([31, 4, 9, 0], 2)
    context = PlanContext.of(shape)
    plan = policy(now, context, planned[None])
    policy.check(now, context, plan)
    assert plan.quota.tolist() == [[15, 16], [4, 0], [0, 9], [0, 0]]
    fresh, quota = policy(now, context, now[None]), POLICIES["quota"](now, context, now[None])
    assert np.array_equal(fresh.quota, quota.quota)
    assert np.array_equal(fresh.slot_expert, quota.slot_expert)


def test_lplb_splits_by_the_batch() -> None:
    """The past copies experts 0 and 1 to both ranks; now expert 2, with one copy, is hot.

    Its 40 fill one rank, so all of experts 0 and 1 goes to the other.
    """
    past, now = loads_of([100, 60, 0, 0], 2)[None], loads_of([30, 10, 40, 0], 2)
    assert rank_loads("lplb", now, 1, past) == [40, 40]
    assert sorted(rank_loads("eplb", now, 1, past)) == [20, 60]


def test_llep_spills_down_to_the_capacity() -> None:
    """Mean 1000, capacity 1100: the heaviest expert stays, with what fits beside the rest."""
    loads = loads_of([1200, 300, 300, 200], 2)
    assert rank_loads("llep", loads, 2, no_history(loads)) == [1100, 900]
