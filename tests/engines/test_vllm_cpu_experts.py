"""Unquantised experts on CPU: every way of computing them gives what the formula does."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.platforms import current_platform

    from tests.support import vllm_cpu_layers
    from tests.support.ranks import fresh_run_path, run_ranks
    from tests.support.vllm_ragged import join_group, ragged_communicator
    from ultraep_serve.engines.vllm import cpu_experts
from ultraep_kernels.host.unpack import unpack

from ultraep_serve.engines.common.ways import Way, is_exact
from ultraep_serve.engines.vllm.checks import has_amx

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 96, 64, 3
NUM_TOKENS = 500  # more rows of an expert than one product computes
DTYPES = (torch.bfloat16, torch.float32)
ERRORS = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # relative


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    current_platform.import_kernels()


def make_layer(**kind: Any) -> tuple[Any, list[torch.Tensor]]:
    return vllm_cpu_layers.make_layer((NUM_EXPERTS, HIDDEN, INNER, TOP_K), **kind)


def ways_by_name(layer: Any) -> dict[str, Way]:
    return {way.name: way for way in cpu_experts.ways_of(layer)}


def make_batch(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Tokens, weights and local experts; two assignments in five are another rank's."""
    generator = torch.Generator().manual_seed(1)
    local = torch.randint(-4, NUM_EXPERTS, (NUM_TOKENS, TOP_K), generator=generator)
    return (
        torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype),
        torch.rand(NUM_TOKENS, TOP_K, generator=generator),
        local.clamp(min=-1).int(),
    )


def expected_output(
    layer: Any, matrices: list[torch.Tensor], x: torch.Tensor, weights: torch.Tensor, local: Any
) -> torch.Tensor:
    """The formula in float64, of all experts for all tokens."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    w1_bias, w2_bias = (
        torch.zeros(NUM_EXPERTS, 1) if bias is None else bias
        for bias in (kernel.w1_bias, kernel.w2_bias)
    )
    w13, w2 = (matrix.double() for matrix in matrices)
    gate, up = (torch.einsum("th,eih->tei", x.double(), w13) + w1_bias.double()).chunk(2, dim=2)
    inner = cpu_experts._ACTIVATIONS[layer.activation](gate) * up
    outputs = torch.einsum("tei,ehi->teh", inner, w2) + w2_bias.double()
    share = torch.zeros(NUM_TOKENS, NUM_EXPERTS + 1, dtype=torch.float64)
    share.scatter_add_(1, local.long() + 1, weights.double())
    return torch.einsum("te,teh->th", share[:, 1:], outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", cpu_experts._ACTIVATIONS, ids=lambda one: one.value)
def test_every_way_computes_the_formula(
    activation: MoEActivation, biased: bool, dtype: torch.dtype
) -> None:
    layer, matrices = make_layer(activation=activation, biased=biased, dtype=dtype)
    batch = make_batch(dtype)
    ways = ways_by_name(layer)
    assert list(ways) == ["kernel", "products", *["float32"] * (dtype != torch.float32), "sums"]
    expected = expected_output(layer, matrices, *batch)
    for name, way in ways.items():
        found = way.total(*batch)
        assert found.dtype == torch.float32
        assert (found - expected).norm() / expected.norm() < ERRORS[dtype], name


def make_amx_layer(**kind: Any) -> tuple[Any, list[torch.Tensor]]:
    if not has_amx():
        pytest.skip("needs a CPU with AMX")
    return make_layer(amx=True, **kind)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_every_way_with_amx_computes_the_formula() -> None:
    layer, matrices = make_amx_layer()
    batch = make_batch()
    ways = ways_by_name(layer)
    assert list(ways) == ["kernel", "tiles", "sums"]
    assert is_exact(ways["kernel"], batch)
    assert is_exact(ways["tiles"], batch)
    expected = expected_output(layer, matrices, *batch)
    for way in ways.values():
        found = way.total(*batch)
        assert (found - expected).norm() / expected.norm() < ERRORS[torch.bfloat16]


@pytest.mark.usefixtures("_one_thread")
def test_what_tiles_do_not_compute_is_left_to_vllms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ({"biased": True}, {"activation": MoEActivation.GELU}):
        assert list(ways_by_name(make_amx_layer(**kind)[0])) == ["kernel", "sums"]
    layer, _ = make_amx_layer()
    layer.apply_router_weight_on_input = True
    assert list(ways_by_name(layer)) == ["kernel"]
    layer.apply_router_weight_on_input = False
    monkeypatch.setattr(cpu_experts, "cpu_prepack_moe_weight", lambda plain, isa: plain)
    cpu_experts.is_packed_for_tiles.cache_clear()
    assert list(ways_by_name(layer)) == ["kernel", "sums"]
    cpu_experts.is_packed_for_tiles.cache_clear()


@pytest.mark.parametrize("name", ["kernel", "products", "float32"])
def test_what_a_token_gets_does_not_depend_on_where_it_is_computed(name: str) -> None:
    """Some assignments here and the others elsewhere, so that experts have other rows beside."""
    way = ways_by_name(make_layer()[0])[name]
    x, weights, local = make_batch()
    if not is_exact(way, (x, weights, local)):
        assert name != "kernel"
        pytest.skip(f"{name} add up in another order where rows are few on this CPU")
    together = way.total(x, weights, local)
    generator = torch.Generator().manual_seed(2)
    for share in (0.02, 0.5):
        keep = torch.rand(local.shape, generator=generator) < share
        here = way.total(x, weights, torch.where(keep, local, -1))
        there = way.total(x, weights, torch.where(keep, -1, local))
        assert torch.equal(here + there, together)


@pytest.mark.parametrize("name", ["kernel", "sums"])
def test_large_batches_go_to_vllms_kernel_in_parts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A row takes 4 bytes of scratch for each of H outputs, and no more for 2I inner ones."""
    layer, _ = make_layer()
    batch, rows = make_batch(), []
    way = ways_by_name(layer)[name]
    together = way.total(*batch)
    run = cpu_experts._run_kernel

    def counted(layer: Any, x: torch.Tensor, *rest: torch.Tensor) -> None:
        rows.append(rest[0].numel())
        run(layer, x, *rest)

    monkeypatch.setattr(cpu_experts, "_run_kernel", counted)
    most = 100
    monkeypatch.setattr(cpu_experts, "_MOST_SCRATCH", most * 4 * (HIDDEN + 2 * INNER))
    assert torch.equal(way.total(*batch), together)
    assert sum(rows) == (batch[2] >= 0).sum() > most
    assert most - TOP_K < max(rows) <= most


def test_sums_are_rounded_no_more_than_the_engine_rounds_them() -> None:
    """The engine alone: each of two ranks has half of every expert, and rounds its part too."""
    layer, matrices = make_layer()
    x, weights, local = make_batch()
    local = local.clamp(min=0)
    expected = expected_output(layer, matrices, x, weights, local)
    halves = []
    for half in range(2):
        part, _ = vllm_cpu_layers.make_layer((NUM_EXPERTS, HIDDEN, INNER // 2, TOP_K))
        w13 = matrices[0].view(NUM_EXPERTS, 2, 2, INNER // 2, HIDDEN)[:, :, half]
        w2 = matrices[1].view(NUM_EXPERTS, HIDDEN, 2, INNER // 2)[:, :, half]
        w13 = w13.reshape(NUM_EXPERTS, INNER, HIDDEN)
        part.w13_weight = cpu_prepack_moe_weight(w13, "vec")
        part.w2_weight = cpu_prepack_moe_weight(w2.contiguous(), "vec")
        halves.append(ways_by_name(part)["sums"].total(x, weights, local))
    is_first = local < NUM_EXPERTS // 2
    experts = [
        ways_by_name(layer)["sums"].total(x, weights, torch.where(own, local, -1))
        for own in (is_first, ~is_first)
    ]
    engine, ours = ((parts[0] + parts[1] - expected).norm() for parts in (halves, experts))
    assert 0 < ours < 1.1 * engine


def test_one_expert_of_a_token_leaves_nothing_to_sum() -> None:
    layer, _ = make_layer()
    layer.moe_config.dp_size = 2  # an assignment comes in a row of its own
    assert "sums" not in ways_by_name(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_matrices_are_unpacked(dtype: torch.dtype) -> None:
    assert cpu_experts.is_packed_as_known(dtype)
    _, matrices = make_layer()
    for matrix in matrices:
        packed = cpu_prepack_moe_weight(matrix.to(dtype), "vec")
        assert torch.equal(unpack(packed[3]), matrix[3].to(dtype).T)


def test_unknown_packing_is_left_to_vllms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = make_layer()
    monkeypatch.setattr(cpu_experts, "cpu_prepack_moe_weight", lambda plain, isa: plain)
    cpu_experts.is_packed_as_known.cache_clear()
    assert list(ways_by_name(layer)) == ["kernel", "sums"]
    cpu_experts.is_packed_as_known.cache_clear()


def compute_on_rank(rank: int, path: str, in_shared_memory: bool) -> tuple[list[bool], list[Any]]:
    """Whether each group has ragged collectives, and a rank's output by our dispatch and theirs."""
    current_platform.import_kernels()
    group = join_group(rank, 2, path)
    has_them = [cpu_experts.has_ragged_collectives(group)]
    group.device_communicator = ragged_communicator(group, in_shared_memory)
    has_them.append(cpu_experts.has_ragged_collectives(group))

    layer, _ = make_layer()
    layer.w2_weight *= 1 + rank  # so that no expert is like the other rank's
    way = ways_by_name(layer)["kernel"]
    x, weights, local = (tensor[rank * 170 :] for tensor in make_batch())  # 500 and 330 tokens
    physical = torch.where(local < 0, -1, local + NUM_EXPERTS * (torch.arange(TOP_K) % 2))
    assignments = cpu_experts.Assignments.from_physical(physical, NUM_EXPERTS)
    asked: list[int] = []

    def way_of(num_tokens: int) -> Way:
        asked.append(num_tokens)
        return way

    outputs = [
        cpu_experts.dispatch_compute_combine(way_of, x, weights, assignments, group.cpu_group),
        cpu_experts.gather_compute_scatter(way_of, x, weights, assignments, group),
    ]
    assert asked == [830, 830]
    return has_them, [output.float().tolist() for output in outputs]


@pytest.mark.parametrize("in_shared_memory", [True, False])
def test_vllms_own_collectives_for_data_parallel_ranks_are_used_where_they_are(
    in_shared_memory: bool,
) -> None:
    with fresh_run_path() as path:
        found = run_ranks(compute_on_rank, 2, str(path), in_shared_memory)
    for has_them, (ours, theirs) in found:
        assert has_them[1]
        assert torch.tensor(theirs).abs().sum() > 0
        assert ours == theirs
