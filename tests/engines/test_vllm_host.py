"""Kernels of ours on CPU: what they give is the formula, wherever experts are computed."""

import os
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.distributed import parallel_state
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
        X86CPUUnquantizedExperts,
    )
    from vllm.platforms import current_platform

    from ultraep_serve.engines.vllm import host
    from ultraep_serve.engines.vllm.checks import has_amx
    from ultraep_serve.engines.vllm.host import HostExperts, HostStage, by_products, has_products

from tests.support.experts import sum_of_experts
from tests.support.hosts import engine_group
from tests.support.instruction_sets import INSTRUCTION_SETS, pretend
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.engines.common import cpu_experts
from ultraep_serve.engines.common.cpu_experts import is_exact

NUM_RANKS = 2
NUM_LOCAL, HIDDEN, INNER, TOP_K = 6, 96, 64, 3
NUM_EXPERTS = NUM_RANKS * NUM_LOCAL
NUM_TOKENS = 1300  # more rows of an expert than one product computes
DTYPES = (torch.bfloat16, torch.float32)
ERRORS = {torch.bfloat16: 0.01, torch.float32: 1e-5}  # relative
NEEDS_AMX = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    current_platform.import_kernels()


class _Layer(SimpleNamespace):
    __hash__ = object.__hash__


def make_layer(
    dtype: torch.dtype = torch.bfloat16,
    activation: MoEActivation = MoEActivation.SILU,
    biased: bool = False,
    amx: bool = False,
    dp_size: int = 1,
) -> tuple[Any, list[torch.Tensor]]:
    """A rank's layer as far as vLLM's kernel looks at it, and w13 (L, 2I, H) and w2 (L, H, I).

    The latter before packing. With ``amx`` for vLLM's kernel that needs it.
    """
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    w13 = random(NUM_LOCAL, 2 * INNER, HIDDEN) / HIDDEN**0.5
    w2 = random(NUM_LOCAL, HIDDEN, INNER) / INNER**0.5
    biases = (random(NUM_LOCAL, 2 * INNER), random(NUM_LOCAL, HIDDEN)) if biased else (None,) * 2
    kind = X86CPUUnquantizedExperts if amx else CPUUnquantizedExperts
    kernel = kind.__new__(kind)
    kernel._use_zentorch = False
    kernel.quant_config = biased_moe_quant_config(*biases)
    kernel.moe_config = moe = SimpleNamespace(
        num_experts=NUM_EXPERTS,
        ep_size=NUM_RANKS,
        dp_size=dp_size,
        in_dtype=dtype,
        experts_per_token=TOP_K,
        moe_parallel_config=SimpleNamespace(dp_size=dp_size, use_ep=True),
    )
    layer = _Layer(
        w13_weight=cpu_prepack_moe_weight(w13, kind.isa),
        w2_weight=cpu_prepack_moe_weight(w2, kind.isa),
        top_k=TOP_K,
        moe_config=moe,
        quant_method=SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel)),
        activation=activation,
        apply_router_weight_on_input=False,
    )
    return layer, [w13, w2]


def put_in_kernel(layer: Any, *, with_products: bool = False) -> HostStage:
    """Give ``layer`` the kernel that is ours, as ``put_in_kernels`` does; returns its stage."""
    stage = HostStage(layer.moe_config)
    kernel = layer.quant_method.moe_kernel.fused_experts
    experts = HostExperts.__new__(HostExperts)  # whose base looks at more of a configuration
    experts.kernel, experts._stage, experts._with_products = kernel, stage, with_products
    experts.moe_config, experts.quant_config = kernel.moe_config, kernel.quant_config
    layer.quant_method.moe_kernel = mk.FusedMoEKernel(stage, experts)
    return stage


def compute(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The output (T, H) of ``layer``'s kernel for ``x`` (T, H)."""
    output: torch.Tensor = layer.quant_method.moe_kernel.apply(
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=ids,
        activation=layer.activation,
        global_num_experts=layer.moe_config.num_experts,
        expert_map=None,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
    )
    return output


def make_batch(
    dtype: torch.dtype = torch.bfloat16, num_tokens: int = NUM_TOKENS
) -> tuple[torch.Tensor, ...]:
    """Tokens, weights and ids of experts of both ranks, a few of them padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, NUM_EXPERTS, (num_tokens, TOP_K), generator=generator)
    return (
        torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype),
        torch.rand(num_tokens, TOP_K, generator=generator),
        ids.int(),
    )


def expected_output(
    layer: Any, matrices: list[torch.Tensor], x: torch.Tensor, weights: torch.Tensor, ids: Any
) -> torch.Tensor:
    """The formula in float64; rank 1 has the same experts as rank 0."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    biases = [None if bias is None else bias.double() for bias in (kernel.w1_bias, kernel.w2_bias)]
    w13, w2 = (matrix.double() for matrix in matrices)

    def expert(rows: torch.Tensor, index: int) -> torch.Tensor:
        own = [None if bias is None else bias[index] for bias in biases]
        gate, up = F.linear(rows, w13[index], own[0]).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, w2[index], own[1]).float()

    local = torch.where(ids < 0, -1, ids % NUM_LOCAL).long()
    return sum_of_experts(x.double(), local, weights.double(), expert)


class Alone:
    """The groups of rank 0 where rank 1, which has the same experts, would give the same."""

    world_size, rank_in_group, ranks, cpu_group = NUM_RANKS, 0, [0, 1], None

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        assert part.dtype is torch.float32
        return part


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_EP", "_TP"):
        monkeypatch.setattr(parallel_state, name, Alone())


@pytest.mark.parametrize("with_products", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("amx", [False, pytest.param(True, marks=NEEDS_AMX)])
@pytest.mark.usefixtures("alone")
def test_a_rank_adds_what_its_own_experts_give(
    amx: bool, biased: bool, dtype: torch.dtype, with_products: bool
) -> None:
    layer, matrices = make_layer(biased=biased, dtype=dtype, amx=amx and dtype is torch.bfloat16)
    if with_products and not has_products(layer):
        pytest.skip("vLLM's kernel computes these")
    put_in_kernel(layer, with_products=with_products)
    x, weights, ids = make_batch(dtype)
    found = compute(layer, x, weights, ids)
    assert found.dtype == dtype
    own = torch.where(ids < NUM_LOCAL, ids, -1)
    expected = expected_output(layer, matrices, x, weights, own)
    assert (found - expected).norm() / expected.norm() < ERRORS[dtype]
    assert compute(layer, x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)
    nobody = torch.full_like(ids, -1)
    assert not compute(layer, x, weights, nobody).any()


@pytest.mark.usefixtures("alone")
def test_large_batches_go_to_vllms_kernel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes 4 bytes of scratch for each of H outputs, and no more for 2I inner ones."""
    layer, _ = make_layer()
    kernel = layer.quant_method.moe_kernel.fused_experts
    put_in_kernel(layer)
    batch, rows = make_batch(), []
    together = compute(layer, *batch)
    run = kernel.apply

    def counted(output: torch.Tensor, *of: Any, **named: Any) -> None:
        rows.append(len(output))
        run(output, *of, **named)

    monkeypatch.setattr(kernel, "apply", counted)
    most = 100
    of_row = (2 + 2 + 4) * HIDDEN  # itself, its output, and that in float32
    monkeypatch.setattr(cpu_experts, "_MOST_BYTES", most * (of_row + 4 * (HIDDEN + 2 * INNER)))
    assert torch.equal(compute(layer, *batch), together)
    assert sum(rows) == ((batch[2] >= 0) & (batch[2] < NUM_LOCAL)).sum()
    assert max(rows) == most


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_products_are_taken_in_the_type_that_this_cpu_multiplies(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(monkeypatch.setattr, name)
    types: list[torch.dtype] = []
    for module, product in ((host.F, "linear"), (host, "float32_product")):
        monkeypatch.setattr(module, product, partial(watched, getattr(module, product), types))
    layer, _ = make_layer()
    by_products(layer.w13_weight, layer.w2_weight, *rows_of(make_batch()))
    expected = torch.bfloat16 if INSTRUCTION_SETS[name].bfloat16 else torch.float32
    assert set(types) == {expected}


def watched(
    product: Any, types: list[torch.dtype], rows: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    types.append(rows.dtype)
    found: torch.Tensor = product(rows, matrix)
    return found


def rows_of(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Rows with a weight and an expert each."""
    x, weights, ids = batch
    return x, weights[:, 0], ids[:, 0] % NUM_LOCAL


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
    host._is_exact.cache_clear()
    monkeypatch.setattr(host, "float32_product", blurred)
    monkeypatch.setattr(host.F, "linear", blurred)
    assert not has_products(layer)
    monkeypatch.undo()
    host._is_exact.cache_clear()
    x, _, experts = rows_of(make_batch())
    products = partial(by_products, layer.w13_weight, layer.w2_weight)
    assert has_products(layer) == is_exact(products, x, experts)
    host._is_packed_as_known.cache_clear()
    monkeypatch.setattr(host, "cpu_prepack_moe_weight", lambda plain, isa: plain)
    assert not has_products(layer)
    host._is_packed_as_known.cache_clear()


def blurred(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Products that also depend on the rows beside."""
    return rows @ matrix.T + rows.mean()


def join_groups(rank: int, path: str) -> None:
    """The groups that vLLM would have made for this rank; ``path`` is one of all ranks."""
    os.environ["VLLM_DIST_IDENT"] = Path(path).name  # of their shared memory
    engine_group(path, rank, NUM_RANKS)
    state: Any = parallel_state
    ranks = [list(range(NUM_RANKS))]
    state._EP = GroupCoordinator(ranks, rank, "gloo", True, group_name="ep")
    state._TP = GroupCoordinator(ranks, rank, "gloo", True, group_name="tp")


CASES = [(dp_size, dtype) for dp_size in (1, NUM_RANKS) for dtype in DTYPES]


def compute_on_rank(rank: int, path: str) -> list[list[list[float]]]:
    """A rank's outputs in all cases."""
    current_platform.import_kernels()
    join_groups(rank, path)
    return [compute_case(rank, dp_size, dtype) for dp_size, dtype in CASES]


def compute_case(rank: int, dp_size: int, dtype: torch.dtype) -> list[list[float]]:
    """With experts where they live, with slots in use, and of as many rows."""
    layer, _ = make_layer(dp_size=dp_size, dtype=dtype)
    stage = put_in_kernel(layer)
    x, weights, ids = make_batch(dtype)
    if dp_size > 1:  # ranks have 1,300 and 730 tokens of their own
        x, weights, ids = (part[rank * 570 :] for part in (x, weights, ids))
    few = slice(rank if dp_size > 1 else 0)
    sent: list[int] = []
    send, patch = host._all_to_all, pytest.MonkeyPatch()
    patch.setattr(host, "_all_to_all", lambda rows, *to: sent.append(len(rows)) or send(rows, *to))
    outputs = [
        compute(layer, x, weights, ids),
        compute(layer, x[few], weights[few], ids[few]),
    ]
    num_local = NUM_LOCAL + 2
    for name in ("w13_weight", "w2_weight"):  # slot 0 of a rank holds expert 1, of slot 1 expert 2
        masters = getattr(layer, name)
        setattr(layer, name, torch.cat([masters, masters[1:3]]))
    stage.num_local = num_local
    physical = torch.where(ids < 0, -1, ids // NUM_LOCAL * num_local + ids % NUM_LOCAL)
    elsewhere = (torch.arange(ids.numel()).view(ids.shape) % 3 == 0) & (ids % NUM_LOCAL == 1)
    physical = torch.where(elsewhere & (ids >= 0), (1 - ids // NUM_LOCAL) * num_local + 6, physical)
    outputs.append(compute(layer, x, weights, physical))
    one = physical[:, :1]  # as many rows as tokens: what experts give may lie in the output itself
    outputs.append(compute(layer, x, weights[:, :1], one))
    patch.undo()
    assert max(sent, default=0) <= NUM_RANKS * NUM_TOKENS  # a token goes to a rank once
    return [output.float().flatten().tolist() for output in outputs]


@pytest.fixture(scope="module")
def computed() -> list[list[list[list[float]]]]:
    """Outputs by rank and case."""
    with fresh_run_path() as path:
        return run_ranks(compute_on_rank, NUM_RANKS, str(path), timeout_seconds=300)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_give_the_formula_wherever_experts_are_computed(
    computed: list[list[list[list[float]]]], case: tuple[int, torch.dtype]
) -> None:
    dp_size, dtype = case
    layer, matrices = make_layer(dtype=dtype)
    for rank, of_rank in enumerate(computed):
        home, few, moved, one = of_rank[CASES.index(case)]
        first = rank * 570 if dp_size > 1 else 0
        x, weights, ids = (part[first:] for part in make_batch(dtype))
        expected = expected_output(layer, matrices, x, weights, ids)
        for output in (home, moved):
            error = torch.tensor(output).view(expected.shape) - expected
            assert error.norm() / expected.norm() < ERRORS[dtype]
        if dtype is torch.bfloat16:
            assert moved == home  # sums are exact
        assert len(few) == (rank * HIDDEN if dp_size > 1 else 0)
        expected = expected_output(layer, matrices, x, weights[:, :1], ids[:, :1])
        error = torch.tensor(one).view(expected.shape) - expected
        assert error.norm() / expected.norm() < ERRORS[dtype]
