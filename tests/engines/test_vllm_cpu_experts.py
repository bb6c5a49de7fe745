"""Unquantised experts on CPU: as products of oneDNN's they are what vLLM's own kernel gives."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.platforms import current_platform

    from ultraep_serve.engines.vllm import cpu_experts
from ultraep_serve.costs.calibration import LEAST_ROWS

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 96, 64, 3
NUM_TOKENS = 500  # more rows of an expert than one product computes


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    current_platform.import_kernels()


def make_layer(activation: MoEActivation, biased: bool) -> tuple[Any, list[torch.Tensor]]:
    """A rank's layer as far as computing it looks at it, and its matrices before packing."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).bfloat16()  # noqa: E731
    w13 = random(NUM_EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5
    w2 = random(NUM_EXPERTS, HIDDEN, INNER) / INNER**0.5
    biases = (
        (random(NUM_EXPERTS, 2 * INNER), random(NUM_EXPERTS, HIDDEN)) if biased else (None,) * 2
    )
    kernel = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    kernel._use_zentorch = False
    kernel.quant_config = biased_moe_quant_config(*biases)
    layer = SimpleNamespace(
        w13_weight=cpu_prepack_moe_weight(w13, "vec"),
        w2_weight=cpu_prepack_moe_weight(w2, "vec"),
        top_k=TOP_K,
        moe_config=SimpleNamespace(num_experts=2 * NUM_EXPERTS),
        quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel)),
        activation=activation,
        apply_router_weight_on_input=False,
    )
    return layer, [w13, w2]


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, weights and local experts; two assignments in five are another rank's."""
    generator = torch.Generator().manual_seed(1)
    local = torch.randint(-4, NUM_EXPERTS, (NUM_TOKENS, TOP_K), generator=generator)
    return (
        torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16(),
        torch.rand(NUM_TOKENS, TOP_K, generator=generator),
        local.clamp(min=-1).int(),
    )


def output(layer: Any, *batch: torch.Tensor, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return cpu_experts.add_up(cpu_experts._outputs(layer, *batch, num_tokens), batch[0].shape)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", cpu_experts._ACTIVATIONS, ids=lambda one: one.value)
def test_products_are_what_the_kernel_gives(
    monkeypatch: pytest.MonkeyPatch, activation: MoEActivation, biased: bool
) -> None:
    layer, _ = make_layer(activation, biased)
    batch = make_batch()
    monkeypatch.setattr(cpu_experts, "has_fast_products", lambda dtype: False)
    by_kernel = output(layer, *batch)
    monkeypatch.setattr(cpu_experts, "has_fast_products", lambda dtype: True)
    monkeypatch.setattr(cpu_experts, "_run_kernel", None)
    by_products = output(layer, *batch)
    error = (by_products - by_kernel).norm() / by_kernel.norm()
    assert 0 < error < 0.01  # both round to bfloat16, at other places


@pytest.mark.skipif(
    not cpu_experts.has_fast_products(torch.bfloat16), reason="needs a CPU with AVX512-BF16"
)
def test_what_a_token_gets_does_not_depend_on_where_it_is_computed() -> None:
    """Some assignments here and the others elsewhere, so that experts have other numbers of rows;
    how many tokens there are altogether is the same on all ranks."""
    layer, _ = make_layer(MoEActivation.SILU, biased=False)
    x, weights, local = make_batch()
    together = output(layer, x, weights, local)
    for keep in (torch.rand(local.shape) < 0.02, torch.rand(local.shape) < 0.5):
        here = output(layer, x, weights, torch.where(keep, local, -1))
        there = output(layer, x, weights, torch.where(keep, -1, local))
        assert torch.equal(here + there, together)


def test_costs_are_measured_where_products_are_used() -> None:
    assert cpu_experts._LEAST_ROWS < LEAST_ROWS


def test_small_batches_are_left_to_vllms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode: a product would unpack more weights than it computes rows."""
    monkeypatch.setattr(cpu_experts, "has_fast_products", lambda dtype: True)
    monkeypatch.setattr(cpu_experts, "weighted_outputs", None)
    layer, _ = make_layer(MoEActivation.SILU, biased=False)
    fewest = cpu_experts._LEAST_ROWS * 2 * NUM_EXPERTS // TOP_K
    output(layer, *make_batch(), num_tokens=fewest - 1)
    with pytest.raises(TypeError):
        output(layer, *make_batch(), num_tokens=fewest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_matrices_are_unpacked(dtype: torch.dtype) -> None:
    assert cpu_experts.is_packed_as_known(dtype)
    _, matrices = make_layer(MoEActivation.SILU, biased=False)
    for matrix in matrices:
        packed = cpu_prepack_moe_weight(matrix.to(dtype), "vec")
        assert torch.equal(cpu_experts.unpack(packed[3]), matrix[3].to(dtype).T)


def test_unknown_packing_is_left_to_vllms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = make_layer(MoEActivation.SILU, biased=False)
    monkeypatch.setattr(cpu_experts, "has_fast_products", lambda dtype: True)
    assert cpu_experts._has_products(layer)
    monkeypatch.setattr(cpu_experts, "cpu_prepack_moe_weight", lambda plain, isa: plain)
    cpu_experts.is_packed_as_known.cache_clear()
    assert not cpu_experts._has_products(layer)
    cpu_experts.is_packed_as_known.cache_clear()
