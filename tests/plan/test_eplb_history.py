"""Policy ``eplb-slots`` live: yesterday's replicas for today's tokens."""

import numpy as np
import pytest
import torch

from tests.balance.test_balancer import LAYERS, SHAPE, Rig, even, skewed
from ultraep_serve.lab.comparators import policy_function
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.eplb_slots import LoadHistory
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView


def eplb_rig(view: TokenView = TokenView.SHARED) -> Rig:
    rig = Rig(view)
    rig.notes.policy = Policy.EPLB_SLOTS
    return rig


def test_codes_of_policies_stay_what_they_were() -> None:
    codes = {policy.value: policy.code for policy in Policy}
    assert codes == {"off": 0, "quota": 1, "ideal": 2, "eplb-slots": 3}


def test_without_a_past_every_expert_stays_on_its_master() -> None:
    rig = eplb_rig()
    for layer in range(LAYERS):  # each layer has its own past
        assert torch.equal(rig.route(skewed(), layer), rig.balancer.identity(skewed()))
        assert rig.decision is Decision.UNPROFITABLE
    assert rig.fabric.streams == 0


@pytest.mark.parametrize("view", list(TokenView))
def test_the_second_batch_gets_the_first_ones_replicas_split_evenly(view: TokenView) -> None:
    rig = eplb_rig(view)
    rig.route(skewed())
    physical = rig.route(skewed())
    assert rig.decision is Decision.PLANNED
    assert rig.fabric.streams == rig.fabric.waits == 1
    record = rig.notes.records[-1]
    total = 112 if view is TokenView.SHARED else 224
    assert record.policy == Policy.EPLB_SLOTS.code
    assert record.load_before.tolist() == [total, 0]
    # One slot elsewhere: half of one of the two experts goes there, a quarter of everything.
    assert record.load_after.tolist() == [total * 3 // 4, total // 4]
    assert torch.equal(physical < 0, skewed() < 0)


def test_a_stale_placement_is_followed_all_the_same() -> None:
    rig = eplb_rig()
    rig.route(skewed())
    rig.route(even())
    assert rig.decision is Decision.PLANNED
    assert rig.notes.records[-1].load_after.tolist() == [56, 72]  # worse than doing nothing


def test_batches_under_quota_are_a_past_too() -> None:
    rig = Rig()
    rig.route(skewed())
    rig.notes.policy = Policy.EPLB_SLOTS
    rig.route(skewed())
    assert rig.decision is Decision.PLANNED


def test_inconsistent_batches_are_no_past() -> None:
    rig = eplb_rig()
    bad = skewed()
    bad[5, 0] = 99
    rig.route(bad)
    assert rig.decision is Decision.INCONSISTENT
    rig.route(skewed())
    assert rig.decision is Decision.UNPROFITABLE


def test_the_plan_is_the_one_that_replay_makes() -> None:
    context = PlanContext.of(ExpertShape(4, 16, 2))
    rng = np.random.default_rng(0)
    past = rng.zipf(1.5, (12, 4, 16)).clip(max=500)
    history = LoadHistory(num_layers=1, batches=8)
    for loads in past:
        history.add(0, loads.sum(axis=0))
    loads = rng.integers(0, 100, (4, 16))
    expected = policy_function("eplb-slots")(loads, context, past[-8:])
    for rank in range(4):
        plan = history.plan(0, loads, context, rank)
        assert plan is not None
        assert np.array_equal(plan.slot_expert, expected.slot_expert)
        assert np.array_equal(plan.quota, expected.quota)
        assert np.array_equal(plan.share, expected.shares[rank])


def test_without_slots_or_tokens_there_is_nothing_to_place() -> None:
    history = LoadHistory(num_layers=1)
    history.add(0, np.zeros(8, np.int64))
    assert history.plan(0, np.ones((2, 8), np.int64), PlanContext.of(SHAPE), 0) is None
    history.add(0, np.ones(8, np.int64))
    assert (
        history.plan(0, np.ones((2, 8), np.int64), PlanContext.of(ExpertShape(2, 8, 0)), 0) is None
    )
