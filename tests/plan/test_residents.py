"""Copies that stay in a layer's slots: right in every batch, and made where they pay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from ultraep_kernels.contract import TURN, Prices

from ultraep_lab.imbalance import imbalance
from ultraep_serve.plan.checks import check_plan, check_slots
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.residents import Residents
from ultraep_serve.types import ExpertShape, Plan

FREE = Prices()
DEAR = Prices(copy=1 << 40)


def drawn(
    random: np.random.Generator, num_ranks: int, share: NDArray[np.float64], tokens: int = 20_000
) -> NDArray[np.int64]:
    return random.multinomial(tokens, share / share.sum(), num_ranks).astype(np.int64)


def follow(
    residents: Residents, loads: NDArray[np.int64], context: PlanContext, prices: Prices
) -> Plan:
    plan = residents.plan(loads, context, 0, prices)
    residents.take(plan)
    return plan


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_every_plan_of_a_row_of_batches_is_right_and_no_worse_than_experts_at_home(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    num_ranks, slots = int(random.integers(1, 7)), int(random.integers(0, 4))
    shape = ExpertShape(num_ranks, num_ranks * int(random.integers(1, 6)), slots)
    speeds = random.choice([1024, 700, 512], num_ranks).astype(np.int64)
    context = PlanContext.of(shape, int(random.integers(1, num_ranks + 1)), speeds)
    prices = Prices(int(random.choice([0, 10**5, 10**7])), int(random.choice([0, 10**6])))
    ranks = [Residents(shape, layer=3) for _ in range(num_ranks)]
    for _ in range(12):
        share = random.permutation(np.arange(1, shape.num_logical_experts + 1.0) ** -2)
        loads = drawn(random, num_ranks, share, int(random.choice([0, 5, 3000])))
        held = ranks[0].slot_expert.copy()
        plans = [own.plan(loads, context, rank, prices) for rank, own in enumerate(ranks)]
        shares = np.stack([plan.share for plan in plans])
        check_plan(loads, context, plans[0].slot_expert, plans[0].quota, shares)
        for own, plan in zip(ranks, plans, strict=True):
            own.take(plan)
            assert np.array_equal(plan.slot_expert, plans[0].slot_expert)
            assert np.array_equal(own.slot_expert, ranks[0].slot_expert)
        now, copied = ranks[0].slot_expert, plans[0].copied
        check_slots(now, context)
        assert np.array_equal(now, np.where(copied >= 0, copied, held))
        assert (copied[copied >= 0] != held[copied >= 0]).all()
        used = plans[0].slot_expert >= 0
        assert (plans[0].slot_expert[used] == now[used]).all()
        if not (copied >= 0).any():
            before = context.busiest_time(context.rank_loads(loads))
            assert context.busiest_time(plans[0].quota.sum(axis=0)) <= before


@pytest.mark.parametrize(("num_ranks", "num_experts", "most"), [(8, 128, 1.01), (64, 256, 1.02)])
def test_steady_traffic_needs_no_copies_once_they_are_there(
    num_ranks: int, num_experts: int, most: float
) -> None:
    random, shape = np.random.default_rng(0), ExpertShape(num_ranks, num_experts, 2)
    context, residents = PlanContext.of(shape), Residents(shape, layer=0)
    share = np.exp(random.normal(0, 1, num_experts))
    found, copies = [], []
    for batch in range(32):
        loads = drawn(random, num_ranks, share, 8 * 8192)
        plan = follow(residents, loads, context, Prices(copy=500 * 1024))
        if batch >= 8:
            found.append(imbalance(plan.quota.sum(axis=0)))
            copies.append((plan.copied >= 0).sum())
    assert np.mean(found) <= most
    assert np.mean(copies) <= (0.2 if num_ranks == 8 else 3)


def test_two_kinds_of_traffic_in_turn_come_to_share_the_slots() -> None:
    """Neither throws away the copies of the other."""
    random, shape = np.random.default_rng(1), ExpertShape(8, 64, 2)
    context, residents = PlanContext.of(shape), Residents(shape, layer=0)
    share = np.exp(random.normal(0, 1, 64))
    plans = []
    for batch in range(40):
        loads = drawn(random, 8, np.roll(share, 37 * (batch % 2)))
        plans.append(follow(residents, loads, context, Prices(copy=2000 * 1024)))
    late = plans[20:]
    assert sum((plan.copied >= 0).sum() for plan in late) <= 4
    assert np.mean([imbalance(plan.quota.sum(axis=0)) for plan in late]) < 1.1


def test_copies_that_cost_more_than_they_save_are_not_made_and_those_there_are_used() -> None:
    random, shape = np.random.default_rng(2), ExpertShape(4, 16, 2)
    context, residents = PlanContext.of(shape), Residents(shape, layer=0)
    share = np.array([8.0, 4, *[1] * 14])
    for _ in range(2 * TURN):
        assert (follow(residents, drawn(random, 4, share), context, DEAR).copied < 0).all()
    follow(residents, drawn(random, 4, share), context, FREE)
    plan = follow(residents, drawn(random, 4, share), context, DEAR)
    assert (plan.copied < 0).all()
    assert imbalance(plan.quota.sum(axis=0)) < 1.05


def test_what_is_forgotten_is_as_if_it_had_never_been() -> None:
    random, shape = np.random.default_rng(3), ExpertShape(4, 16, 2)
    context, prices = PlanContext.of(shape), Prices(copy=100 * 1024)
    batches = [drawn(random, 4, np.exp(random.normal(0, 1, 16))) for _ in range(12)]
    used, new = Residents(shape, layer=1), Residents(shape, layer=1)
    for loads in batches:
        follow(used, loads, context, prices)
    used.forget()
    for loads in batches:
        plans = [follow(each, loads, context, prices) for each in (used, new)]
        assert np.array_equal(plans[0].copied, plans[1].copied)
        assert np.array_equal(plans[0].quota, plans[1].quota)
