"""The cost model: hand-computed cases, and decisions that every rank takes alike."""

import json
from dataclasses import replace

import numpy as np
import pytest
from ultraep_kernels.host.relays import relay_parents

from ultraep_serve.costs.model import (
    CostModel,
    Transfer,
    expected_percent,
    fewest_assignments,
    least_saved,
    saved_picoseconds,
    transfer_of,
)
from ultraep_serve.errors import ConfigError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape, Plan

# 1 us per assignment, 100 us per sent expert, 50 us to plan, 10 us to exchange.
SIMPLE = CostModel(
    seconds_per_assignment=1e-6,
    bytes_per_expert=1_000_000,
    link_bytes_per_second=1e10,
    exchange_seconds=10e-6,
    plan_seconds=50e-6,
    base_seconds=5e-6,
)
HOT = np.array([[300, 0, 20, 20], [300, 0, 20, 20]], np.int32)  # two ranks of two masters
SHAPE = ExpertShape(2, 4, 1)


def pays(loads: np.ndarray, plan: Plan, model: CostModel) -> bool:
    """Whether ``plan`` for ``loads`` (R, E) saves more than it costs, as a server decides."""
    num_ranks, num_experts = loads.shape
    shape = ExpertShape(num_ranks, num_experts, plan.slot_expert.shape[1])
    before = loads.sum(0, dtype=np.int64).reshape(num_ranks, shape.num_masters).sum(1)
    after = plan.quota.sum(0, dtype=np.int64)
    transfer = transfer_of(plan.slot_expert, shape.num_masters)
    costs = model.integer_costs()
    return saved_picoseconds(int(before.max()), int(after.max()), shape, transfer, costs) > 0


def test_saved_time_by_hand() -> None:
    saved = saved_picoseconds(600, 340, SHAPE, Transfer(1, 1), SIMPLE.integer_costs())
    assert saved == (600 - 340) * 10**6 - 100 * 10**6  # the plan has been made


def test_moving_pays_only_above_its_cost() -> None:
    plan = plan_quota(HOT, PlanContext.of(SHAPE), 0)
    after = int(plan.quota.sum(0).max())
    for microseconds, expected in ((-1, True), (0, False), (1, False)):
        moving = (600 - after + microseconds) * 1e-6  # one expert on the link
        assert pays(HOT, plan, CostModel(1e-6, 1, 1 / moving)) is expected


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("read_seconds", [0.0, 2e-5, 1e-3])
def test_the_smallest_batch_that_pays_saves_what_balancing_takes(
    read_seconds: float, copies: int
) -> None:
    """With the imbalance that is expected; just below it, it takes longer."""
    costs, shape = replace(SIMPLE, read_seconds_per_expert=read_seconds).integer_costs(), SHAPE
    fewest = fewest_assignments(costs, shape, copies, None)

    def saved(assignments: int) -> float:
        mean = assignments / shape.num_ranks * costs.per_assignment
        busiest = expected_percent(shape) / 100 * mean
        unbalanced = max(busiest, shape.num_masters * costs.per_expert_read)
        return unbalanced - max(mean, shape.num_local * costs.per_expert_read)

    fixed = costs.exchange + costs.plan + copies * costs.per_expert_sent
    assert saved(fewest - 1) < fixed <= saved(fewest) + 1
    assert fewest_assignments(costs, shape, copies, fewest // 2) == fewest // 2


def test_more_ranks_are_expected_to_be_less_even() -> None:
    """Published loads: 1.07 to 1.5 on 8 ranks, 1.6 to 5.5 on 64."""
    shapes = ExpertShape(8, 128, 2), ExpertShape(16, 128, 2), ExpertShape(64, 128, 2)
    assert [expected_percent(shape) for shape in shapes] == [130, 141, 201]


def test_transfer_counts_senders_receivers_and_relays() -> None:
    slots = np.array([[-1, -1], [0, 1], [0, -1], [0, -1]], np.int32)  # 4 ranks of 2 masters
    assert transfer_of(slots, 2) == Transfer(4, 2)
    parents = np.full((4, 2), -1)
    parents[3, 0] = 1 * 2 + 0  # rank 3 gets expert 0 from rank 1's first slot
    assert transfer_of(slots, 2, parents) == Transfer(3, 2)
    assert transfer_of(np.full((4, 0), -1, np.int32), 2) == Transfer(0, 0)


@pytest.mark.parametrize(
    ("hop_seconds", "relayed"), [(0.0, True), (299e-6, True), (300e-6, False), (1.0, False)]
)
def test_relays_are_chosen_where_a_hop_costs_less_than_they_save(
    hop_seconds: float, relayed: bool
) -> None:
    """Of 8 ranks one sends 6 experts of 100 us each; with two relays 3."""
    slots = np.array([[-1], [0], [0], [0], [0], [0], [1], [-1]], np.int32)
    costs = replace(SIMPLE, relay_hop_seconds=hop_seconds).integer_costs()
    parents = relay_parents(slots, 16, "auto", least_saved(costs))
    direct, found = transfer_of(slots, 16), transfer_of(slots, 16, parents)
    assert direct.busiest_sender == 6
    assert found == (Transfer(3, 1) if relayed else direct)
    assert least_saved(replace(SIMPLE, exposed_fraction=0.0).integer_costs()) > slots.size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "object"),
        ('{"seconds_per_assignment": 1}', "must also have"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "latency": 1}), "unknown costs"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "link_bytes_per_second": 0}), "more than 0"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "base_seconds": "x"}), "a number"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "exposed_fraction": 2}), "0 to 1"),
        (SIMPLE.to_json().replace("1e-06", "NaN"), "a number"),
    ],
)
def test_bad_cost_models_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CostModel.from_json(text)
