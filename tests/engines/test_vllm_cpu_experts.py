"""Unquantised experts on CPU: vLLM's kernel and torch's products give what the formula does."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.platforms import current_platform

    from tests.support import vllm_cpu_layers
    from tests.support.ranks import fresh_run_path, run_ranks
    from tests.support.vllm_ragged import join_group, ragged_communicator
    from ultraep_serve.engines.vllm import cpu_experts
    from ultraep_serve.engines.vllm.checks import has_amx
    from ultraep_serve.engines.vllm.cpu_experts import by_kernel, by_products, has_products

from tests.support.instruction_sets import INSTRUCTION_SETS, pretend
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.cpu_experts import Compute, is_exact

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 96, 64, 3
NUM_ROWS = 1700  # more of an expert than one product computes
DTYPES = (torch.bfloat16, torch.float32)
NEEDS_AMX = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")
ERRORS = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # relative


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    current_platform.import_kernels()


def make_layer(**kind: Any) -> tuple[Any, list[torch.Tensor]]:
    return vllm_cpu_layers.make_layer((NUM_EXPERTS, HIDDEN, INNER, TOP_K), **kind)


def make_batch(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Rows, each with a weight and an expert."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(NUM_ROWS, HIDDEN, generator=generator).to(dtype),
        torch.rand(NUM_ROWS, generator=generator),
        torch.randint(NUM_EXPERTS, (NUM_ROWS,), generator=generator, dtype=torch.int32),
    )


def expected_output(
    layer: Any, matrices: list[torch.Tensor], x: torch.Tensor, weights: torch.Tensor, experts: Any
) -> torch.Tensor:
    """The formula in float64, of all experts for all rows."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    w1_bias, w2_bias = (
        torch.zeros(NUM_EXPERTS, 1) if bias is None else bias
        for bias in (kernel.w1_bias, kernel.w2_bias)
    )
    w13, w2 = (matrix.double() for matrix in matrices)
    gate, up = (torch.einsum("nh,eih->nei", x.double(), w13) + w1_bias.double()).chunk(2, dim=2)
    outputs = torch.einsum("nei,ehi->neh", F.silu(gate) * up, w2) + w2_bias.double()
    return outputs[torch.arange(NUM_ROWS), experts.long()] * weights[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("amx", [False, pytest.param(True, marks=NEEDS_AMX)])
def test_every_kernel_computes_the_formula(amx: bool, biased: bool, dtype: torch.dtype) -> None:
    layer, matrices = make_layer(biased=biased, dtype=dtype, amx=amx and dtype is torch.bfloat16)
    batch = make_batch(dtype)
    expected = expected_output(layer, matrices, *batch)
    for compute in (by_kernel, by_products) if has_products(layer) else (by_kernel,):
        found = compute(layer, *batch)
        assert found.dtype == dtype
        assert (found - expected).norm() / expected.norm() < ERRORS[dtype]
        assert compute(layer, *(tensor[:0] for tensor in batch)).shape == (0, HIDDEN)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_products_are_taken_in_the_type_that_this_cpu_multiplies(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(monkeypatch.setattr, name)
    types: list[torch.dtype] = []
    for module, product in ((cpu_experts.F, "linear"), (cpu_experts, "float32_product")):
        seen = partial(watched, getattr(module, product), types)
        monkeypatch.setattr(module, product, seen)
    layer, _ = make_layer()
    by_products(layer, *make_batch())
    expected = torch.bfloat16 if INSTRUCTION_SETS[name].bfloat16 else torch.float32
    assert set(types) == {expected}


def watched(
    product: Any, types: list[torch.dtype], rows: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    types.append(rows.dtype)
    found: torch.Tensor = product(rows, matrix)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"biased": True},
        {"activation": MoEActivation.GELU},
        pytest.param({"amx": True}, marks=NEEDS_AMX),
    ],
    ids=str,
)
def test_what_products_do_not_compute_is_left_to_vllms_kernel(kind: dict[str, Any]) -> None:
    assert not has_products(make_layer(**kind)[0])


def test_unknown_packing_and_inexact_products_are_left_to_vllms_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, _ = make_layer()
    cpu_experts._is_exact.cache_clear()
    monkeypatch.setattr(cpu_experts, "float32_product", blurred)
    monkeypatch.setattr(cpu_experts.F, "linear", blurred)
    assert not has_products(layer)
    monkeypatch.undo()
    cpu_experts._is_exact.cache_clear()
    exact = has_products(layer)
    assert exact == is_exact(partial(by_products, layer), *make_batch()[::2])
    cpu_experts._is_packed_as_known.cache_clear()
    monkeypatch.setattr(cpu_experts, "cpu_prepack_moe_weight", lambda plain, isa: plain)
    assert not has_products(layer)
    cpu_experts._is_packed_as_known.cache_clear()


def blurred(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Products that also depend on the rows beside."""
    return rows @ matrix.T + rows.mean()


def test_what_a_row_gets_does_not_depend_on_where_it_is_computed() -> None:
    layer, _ = make_layer()
    x, _, experts = make_batch()
    assert is_exact(partial(by_kernel, layer), x, experts)


@pytest.mark.parametrize(
    ("num_tokens", "compute"),
    [(100, by_kernel), (cpu_experts._MANY_ROWS * 2 * NUM_EXPERTS // TOP_K, by_products)],
)
def test_products_are_for_large_batches(num_tokens: int, compute: Any) -> None:
    layer, _ = make_layer()
    execution = cpu_experts.CpuExperts(BalanceConfig())
    execution._by_products = {layer}
    assert execution._chosen(layer, num_tokens).func is compute
    execution._by_products = set()
    assert execution._chosen(layer, num_tokens).func is by_kernel


def test_large_batches_go_to_vllms_kernel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes 4 bytes of scratch for each of H outputs, and no more for 2I inner ones."""
    layer, _ = make_layer()
    batch, rows = make_batch(), []
    together = by_kernel(layer, *batch)
    kernel = layer.quant_method.moe_kernel.fused_experts
    run = kernel.apply

    def counted(**named: Any) -> None:
        rows.append(len(named["output"]))
        run(**named)

    monkeypatch.setattr(kernel, "apply", counted)
    most = 100
    monkeypatch.setattr(cpu_experts, "_MOST_SCRATCH", most * 4 * (HIDDEN + 2 * INNER))
    assert torch.equal(by_kernel(layer, *batch), together)
    assert sum(rows) == NUM_ROWS
    assert max(rows) == most


def compute_on_rank(rank: int, path: str, in_shared_memory: bool) -> tuple[list[bool], list[Any]]:
    """Whether each group has ragged collectives, and a rank's output by our dispatch and theirs."""
    current_platform.import_kernels()
    group = join_group(rank, 2, path)
    has_them = [cpu_experts.has_ragged_collectives(group)]
    group.device_communicator = ragged_communicator(group, in_shared_memory)
    has_them.append(cpu_experts.has_ragged_collectives(group))

    layer, _ = make_layer()
    layer.w2_weight *= 1 + rank  # so that no expert is like the other rank's
    x, weights, experts = make_batch()
    x = x[rank * 170 : 500]  # 500 and 330 tokens
    weights, local = (tensor[: TOP_K * len(x)].view(-1, TOP_K) for tensor in (weights, experts))
    padding = torch.rand(local.shape) < 0.1
    physical = torch.where(padding, -1, local + NUM_EXPERTS * (torch.arange(TOP_K) % 2))
    assignments = cpu_experts.Assignments.from_physical(physical, NUM_EXPERTS)
    asked: list[int] = []

    def chosen(num_tokens: int) -> Compute:
        asked.append(num_tokens)
        return partial(by_kernel, layer)

    outputs = [
        cpu_experts.dispatch_compute_combine(chosen, x, weights, assignments, group.cpu_group),
        cpu_experts.gather_compute_scatter(chosen, x, weights, assignments, group),
    ]
    assert asked == [830, 830]
    return has_them, [output.float().tolist() for output in outputs]


@pytest.mark.parametrize("in_shared_memory", [True, False])
def test_vllms_own_collectives_for_data_parallel_ranks_are_used_where_they_are(
    in_shared_memory: bool,
) -> None:
    with fresh_run_path() as path:
        found = run_ranks(compute_on_rank, 2, str(path), in_shared_memory, timeout_seconds=300)
    for has_them, (ours, theirs) in found:
        assert has_them[1]
        assert torch.tensor(theirs).abs().sum() > 0
        assert ours == theirs
