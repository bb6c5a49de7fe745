"""Model shapes, hardware and predicted times: hand-computed cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep_lab.advise.predict import (
    Prefill,
    break_even_tokens,
    layer_seconds,
    prefill_seconds,
    residual_imbalance,
)
from ultraep_serve.costs.hardware import (
    HARDWARE,
    Efficiency,
    custom_estimate,
    estimate_costs,
    hardware,
)
from ultraep_serve.costs.model import CostModel, Transfer, saved_picoseconds, transfer_of
from ultraep_serve.costs.operator_rates import RATE_NAMES, MeasuredRates
from ultraep_serve.costs.shapes import PRESETS, model_shape, shape_from_config
from ultraep_serve.errors import ConfigError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape, imbalance

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
SHAPE = ExpertShape(2, 4, 1)


def test_layer_seconds_by_hand() -> None:
    off = layer_seconds(SIMPLE, busiest_assignments=600, rank_tokens=340, held_experts=2)
    assert off == pytest.approx(5e-6 + 340 * 2e-6 + 600e-6)
    on = layer_seconds(SIMPLE, 340, 340, 3, transfer=Transfer(2, 1), exchanged=True)
    assert on == pytest.approx(5e-6 + 340 * 2e-6 + 340e-6 + 10e-6 + 50e-6 + 2 * 100e-6)


def test_reading_weights_bounds_small_batches() -> None:
    model = CostModel(1e-6, 1000, 1e9, read_seconds_per_expert=30e-6)
    assert layer_seconds(model, 10, 0, 4) == pytest.approx(120e-6)
    assert layer_seconds(model, 500, 0, 4) == pytest.approx(500e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32 - 1),
    st.floats(1e-9, 1e-4), st.floats(0, 1e-2),
)  # fmt: skip
def test_a_plan_that_saves_time_is_above_the_residual(
    num_ranks: int, masters: int, slots: int, seed: int, per_assignment: float, plan: float
) -> None:
    shape = ExpertShape(num_ranks, num_ranks * masters, slots)
    rng = np.random.default_rng(seed)
    loads = rng.zipf(1.5, (num_ranks, shape.num_logical_experts)).clip(max=10**5)
    model = CostModel(per_assignment, 10**6, 1e11, plan_seconds=plan)
    before = loads.sum(0).reshape(num_ranks, -1).sum(1)
    found = plan_quota(loads, PlanContext.of(shape), 0)
    most, least = int(before.max()), int(found.quota.sum(0, dtype=np.int64).max())
    transfer = transfer_of(found.slot_expert, masters)
    if saved_picoseconds(most, least, shape, transfer, model.integer_costs()) > 0:
        assert imbalance(before) > residual_imbalance(model, float(before.mean())) * (1 - 1e-9)


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


def test_expert_memory_by_hand() -> None:
    qwen, deepseek = model_shape("qwen3-235b-a22b"), model_shape("deepseek-v3")
    assert qwen.expert_bytes("bf16") == 36 * MIB
    assert deepseek.expert_bytes("fp8") == pytest.approx(42 * MIB, rel=0.001)  # and block scales


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


def measured(rates: dict[str, float]) -> MeasuredRates:
    return MeasuredRates("us", "gb200", "bf16", 1000, 4096, 1536, rates)


def test_estimate_from_measured_rates_by_hand() -> None:
    shape, machine = model_shape("qwen3-235b-a22b"), hardware("gb200")
    rates = dict(zip(RATE_NAMES, (1e15, 2e15, 4e15, 5e12, 5e11), strict=True))
    estimate = estimate_costs(
        shape, machine, num_ranks=64, context_tokens=1000, measured=measured(rates)
    )
    costs = estimate.costs
    assert costs.seconds_per_assignment == pytest.approx(6 * 4096 * 1536 / 1e15 + 4096 * 4 / 5e11)
    scores = 4 * 64 * 128 * 500 / 4e15
    assert costs.other_seconds_per_token == pytest.approx(shape.shared_flops / 2e15 + scores)
    assert costs.read_seconds_per_expert == pytest.approx(36 * MIB / 5e12)
    assert costs.link_bytes_per_second == pytest.approx(900e9 * Efficiency().link)  # moved experts
    assert "us" in estimate.assumptions[0]


def test_what_was_not_measured_is_taken_from_the_data_sheet() -> None:
    shape, machine = model_shape("qwen3-235b-a22b"), hardware("gb200")
    sheet = estimate_costs(shape, machine, num_ranks=64).costs
    mixed = estimate_costs(shape, machine, num_ranks=64, measured=measured({"dense_flops": 1e15}))
    assert mixed.costs.seconds_per_assignment == sheet.seconds_per_assignment
    assert mixed.costs.other_seconds_per_token > sheet.other_seconds_per_token
    assert "not measured: links of moved experts, expert_flops" in mixed.assumptions[0]


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
