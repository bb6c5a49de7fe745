"""The cost model: hand-computed cases, fits, and decisions that every rank takes alike."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep_serve.costs.calibration import fit
from ultraep_serve.costs.model import (
    CostModel,
    Transfer,
    pick_relay,
    saved_picoseconds,
    transfer_of,
)
from ultraep_serve.errors import ConfigError
from ultraep_serve.offline.hardware import (
    HARDWARE,
    Efficiency,
    custom_estimate,
    estimate_costs,
    hardware,
)
from ultraep_serve.offline.predict import (
    Prefill,
    break_even_tokens,
    layer_seconds,
    prefill_seconds,
    residual_imbalance,
    slot_memory,
)
from ultraep_serve.offline.shapes import PRESETS, model_shape, shape_from_config
from ultraep_serve.planner.quota import identity_plan, plan_quota
from ultraep_serve.types import ExpertShape, Plan, imbalance

MIB = 1 << 20
# 1 us per assignment, 100 us per sent expert, 50 us to plan, 10 us to exchange.
SIMPLE = CostModel(
    seconds_per_assignment=1e-6,
    bytes_per_expert=1_000_000,
    link_bytes_per_second=1e10,
    exchange_seconds=10e-6,
    plan_seconds=50e-6,
    base_seconds=5e-6,
    other_seconds_per_token=2e-6,
)
HOT = np.array([[300, 0, 20, 20], [300, 0, 20, 20]], np.int32)  # two ranks of two masters
SHAPE = ExpertShape(2, 4, 1)


def worth_it(loads: np.ndarray, plan: Plan, model: CostModel) -> bool:
    """Whether ``plan`` for ``loads`` (R, E) saves more than it costs, as a server decides."""
    num_ranks, num_experts = loads.shape
    shape = ExpertShape(num_ranks, num_experts, plan.slot_expert.shape[1])
    before = loads.sum(0, dtype=np.int64).reshape(num_ranks, shape.num_masters).sum(1)
    after = plan.quota.sum(0, dtype=np.int64)
    transfer = transfer_of(plan.slot_expert, shape.num_masters)
    costs = model.integer_costs()
    return saved_picoseconds(int(before.max()), int(after.max()), shape, transfer, costs) > 0


def test_layer_seconds_by_hand() -> None:
    off = layer_seconds(SIMPLE, busiest_assignments=600, rank_tokens=340, held_experts=2)
    assert off == pytest.approx(5e-6 + 340 * 2e-6 + 600e-6)
    on = layer_seconds(SIMPLE, 340, 340, 3, transfer=Transfer(2, 1), exchanged=True)
    assert on == pytest.approx(5e-6 + 340 * 2e-6 + 340e-6 + 10e-6 + 50e-6 + 2 * 100e-6)


def test_reading_weights_bounds_small_batches() -> None:
    model = CostModel(1e-6, 1000, 1e9, read_seconds_per_expert=30e-6)
    assert layer_seconds(model, 10, 0, 4) == pytest.approx(120e-6)
    assert layer_seconds(model, 500, 0, 4) == pytest.approx(500e-6)


def test_saved_time_by_hand() -> None:
    saved = saved_picoseconds(600, 340, SHAPE, Transfer(1, 1), SIMPLE.integer_costs())
    assert saved == (600 - 340) * 10**6 - 50 * 10**6 - 100 * 10**6


def test_worth_it_changes_where_saving_equals_cost() -> None:
    plan = plan_quota(HOT, SHAPE, 0)
    after = int(plan.quota.sum(0).max())
    plan_seconds = (600 - after - 100) * 1e-6  # saving minus one expert on the link
    for microseconds, pays in ((-1, True), (0, False), (1, False)):
        model = CostModel(1e-6, 10**6, 1e10, plan_seconds=plan_seconds + microseconds * 1e-6)
        assert worth_it(HOT, plan, model) is pays


def test_nothing_moved_is_never_worth_it() -> None:
    assert not worth_it(HOT, identity_plan(HOT, SHAPE, 0), SIMPLE)
    empty = np.zeros((2, 4), np.int32)
    assert not worth_it(empty, plan_quota(empty, SHAPE, 0), SIMPLE)


def test_all_ranks_decide_alike_with_huge_counts() -> None:
    loads = np.zeros((8, 16), np.int64)
    loads[:, 0] = (2**31 - 1) // 8
    shape = ExpertShape(8, 16, 2)
    answers = {worth_it(loads, plan_quota(loads, shape, rank), SIMPLE) for rank in range(8)}
    assert answers == {True}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32 - 1),
    st.floats(1e-9, 1e-4), st.floats(0, 1e-2),
)  # fmt: skip
def test_a_plan_worth_it_is_above_the_residual(
    num_ranks: int, masters: int, slots: int, seed: int, per_assignment: float, plan: float
) -> None:
    shape = ExpertShape(num_ranks, num_ranks * masters, slots)
    rng = np.random.default_rng(seed)
    loads = rng.zipf(1.5, (num_ranks, shape.num_logical_experts)).clip(max=10**5)
    model = CostModel(per_assignment, 10**6, 1e11, plan_seconds=plan)
    before = loads.sum(0).reshape(num_ranks, -1).sum(1)
    if worth_it(loads, plan_quota(loads, shape, 0), model):
        assert imbalance(before) > residual_imbalance(model, float(before.mean())) * (1 - 1e-9)


def test_decisions_are_monotone() -> None:
    plan = plan_quota(HOT, SHAPE, 0)
    by_cost = [
        worth_it(HOT, plan, CostModel(1e-6, size, 1e10)) for size in (10**3, 10**6, 10**7, 10**9)
    ]
    assert by_cost == sorted(by_cost, reverse=True)
    assert set(by_cost) == {True, False}
    by_size = []
    for factor in (1, 10, 100):
        loads = HOT * factor
        costs = CostModel(1e-6, 10**7, 1e10)
        by_size.append(worth_it(loads, plan_quota(loads, SHAPE, 0), costs))
    assert by_size == [False, True, True]


def test_residual_falls_with_the_batch() -> None:
    assert residual_imbalance(SIMPLE, 1500) == pytest.approx(1 + 150e-6 / 1500e-6)
    assert residual_imbalance(SIMPLE, 150_000) == pytest.approx(1.001)
    assert residual_imbalance(SIMPLE, 0) == float("inf")


def test_break_even_by_hand() -> None:
    # 2 ranks, top-1: the busiest rank has 1.5 or 1.0 times T / 2; 160 us are saved at T = 640.
    assert break_even_tokens(SIMPLE, SHAPE, 1, 1.5, 1.0, Transfer(1, 1)) == pytest.approx(
        640, abs=3
    )
    assert break_even_tokens(SIMPLE, SHAPE, 1, 1.2, 1.2, Transfer(1, 1)) is None


def test_transfer_counts_senders_receivers_and_relays() -> None:
    slots = np.array([[-1, -1], [0, 1], [0, -1], [0, -1]], np.int32)  # 4 ranks of 2 masters
    assert transfer_of(slots, 2) == Transfer(4, 2)
    parents = np.full((4, 2), -1)
    parents[3, 0] = 1 * 2 + 0  # rank 3 gets expert 0 from rank 1's first slot
    relayed = transfer_of(slots, 2, parents)
    assert relayed == Transfer(3, 2, relayed=True)
    slow_hop = CostModel(1e-6, 10**6, 1e10, relay_hop_seconds=101e-6)
    assert pick_relay(transfer_of(slots, 2), relayed, SIMPLE.integer_costs())
    assert not pick_relay(transfer_of(slots, 2), relayed, slow_hop.integer_costs())
    assert transfer_of(np.full((4, 0), -1, np.int32), 2) == Transfer(0, 0)


def test_fit_recovers_known_costs() -> None:
    work = [100, 1000, 5000, 20_000, 60_000]
    line = fit([(x, 3e-4 + 2.5e-6 * x) for x in work])
    assert line.slope == pytest.approx(2.5e-6)
    assert line.intercept == pytest.approx(3e-4)
    assert line.worst_relative_error < 1e-9
    rng = np.random.default_rng(0)
    noisy = fit([(x, (3e-4 + 2.5e-6 * x) * rng.uniform(0.95, 1.05)) for x in work * 20])
    assert noisy.slope == pytest.approx(2.5e-6, rel=0.03)
    assert noisy.worst_relative_error < 0.1


def test_fit_of_a_line_through_zero_has_no_negative_intercept() -> None:
    line = fit([(10, 9e-6), (100, 101e-6), (1000, 1030e-6)])
    assert line.intercept == 0
    assert line.slope == pytest.approx(1e-6, rel=0.1)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(5, 1.0), (5, 2.0)],
        [(1, 2.0), (2, 1.0), (4, 0.1)],
        [(1, 1.0), (2, 0.0)],
        [(1, 1.0), (2, float("nan"))],
        [(-1, 1.0), (2, 2.0)],
    ],
)
def test_fit_refuses_what_is_no_measurement(samples: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError):
        fit(samples)


def test_json_round_trip() -> None:
    assert CostModel.from_json(SIMPLE.to_json()) == SIMPLE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "object"),
        ('{"seconds_per_assignment": 1}', "must also have"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "speed": 1}), "unknown costs"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "link_bytes_per_second": 0}), "more than 0"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "base_seconds": "x"}), "a number"),
        (json.dumps({**json.loads(SIMPLE.to_json()), "exposed_fraction": 2}), "0 to 1"),
        (SIMPLE.to_json().replace("1e-06", "NaN"), "a number"),
    ],
)
def test_bad_cost_models_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CostModel.from_json(text)


def test_preset_shapes_have_the_published_number_of_parameters() -> None:
    published = {  # billions, embeddings included, which shapes leave out
        "qwen3-235b-a22b": (235.1, 2 * 4096 * 151_936),
        "deepseek-v3": (671.0, 2 * 7168 * 129_280),
        "deepseek-v2-lite": (15.7, 2 * 2048 * 102_400),
        "qwen3-30b-a3b": (30.5, 2 * 2048 * 151_936),
    }
    for name, (billions, embeddings) in published.items():
        total = (model_shape(name).weights + embeddings) / 1e9
        assert total == pytest.approx(billions, rel=0.003), name
    assert set(published) < set(PRESETS)


def test_slot_memory_by_hand() -> None:
    qwen = model_shape("qwen3-235b-a22b")
    memory = slot_memory(qwen, 1, "bf16")
    assert memory.shared == 36 * MIB
    assert memory.per_layer == 94 * 36 * MIB  # 3.3 GiB
    assert slot_memory(model_shape("deepseek-v3"), 2, "fp8").shared == pytest.approx(
        84 * MIB, rel=0.001
    )  # and the block scales
    assert slot_memory(qwen, 0, "bf16").per_layer == 0


def test_shapes_of_other_configurations() -> None:
    listed = {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 6, "num_experts": 8,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "mlp_only_layers": [0, 3],
    }  # fmt: skip
    assert shape_from_config(listed, "x").num_moe_layers == 4
    assert shape_from_config({"text_config": listed}, "x").num_moe_layers == 4
    every_other = {**listed, "mlp_only_layers": [], "decoder_sparse_step": 2}
    assert shape_from_config(every_other, "x").num_dense_layers == 3
    mixtral = {key: value for key, value in listed.items() if key != "moe_intermediate_size"}
    assert shape_from_config(mixtral, "x").expert_size == 128


@pytest.mark.parametrize(
    "change", [{"num_experts": None}, {"hidden_size": -1}, {"hidden_size": "8"}]
)
def test_bad_configurations_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        shape_from_config({**PRESETS["qwen3-235b-a22b"], **change}, "x")


def test_estimate_by_hand() -> None:
    shape, machine = model_shape("qwen3-235b-a22b"), hardware("gb200")
    all_of_it = Efficiency(1, 1, 1, 1)
    costs = estimate_costs(shape, machine, num_ranks=64, efficiency=all_of_it).costs
    flops, sent = 6 * 4096 * 1536, 4096 * 4
    assert costs.seconds_per_assignment == pytest.approx(flops / 2500e12 + sent / 900e9)
    assert costs.bytes_per_expert == 36 * MIB
    slower = estimate_costs(shape, machine, num_ranks=64).costs
    assert slower.seconds_per_assignment > costs.seconds_per_assignment


def test_network_time_only_where_domains_are_crossed() -> None:
    shape = model_shape("deepseek-v3")
    inside = estimate_costs(shape, hardware("h200"), num_ranks=8).costs
    across = estimate_costs(shape, hardware("h200"), num_ranks=32).costs
    assert inside.seconds_per_assignment == across.seconds_per_assignment
    assert inside.other_seconds_per_token < across.other_seconds_per_token


def test_prefill_gain_is_at_most_the_imbalance() -> None:
    for name, machine in ((name, machine) for name in PRESETS for machine in HARDWARE.values()):
        shape = model_shape(name)
        estimate = estimate_costs(shape, machine, num_ranks=8)
        seconds = [prefill_seconds(shape, estimate, Prefill(1e6, 8, i)) for i in (1.0, 1.5, 3.0)]
        assert seconds == sorted(seconds)
        assert 1 < seconds[2] / seconds[0] < 3


def test_custom_costs_make_an_estimate() -> None:
    shape = model_shape("deepseek-v3")
    estimate = custom_estimate(shape, SIMPLE, "costs.json")
    assert estimate.costs == SIMPLE
    assert estimate.dense_seconds_per_token > 0


@pytest.mark.parametrize("call", [lambda: hardware("a100"), lambda: Efficiency(matrix=1.2)])
def test_unknown_hardware_and_impossible_efficiency(call: object) -> None:
    assert callable(call)
    with pytest.raises(ConfigError):
        call()
