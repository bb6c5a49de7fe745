"""Experts on CPU for SGLang: what one rank adds, whatever its experts compute."""

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    import tests.support.sglang_fakes  # noqa: F401 - has what SGLang looks for

    # isort: split
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

    from ultraep_serve.engines.sglang import hooks, host
    from ultraep_serve.engines.sglang.host import ACTIVATIONS, HostDispatcher, compute

from tests.support.instruction_sets import INSTRUCTION_SETS, pretend
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import cpu_experts
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy

ROWS = (0, 1, 15, 16, 17, 255, 256, 257, 273, 700)  # around the numbers that are rounded
HIDDEN, INNER, TOP_K = 24, 8, 2
RUNS: dict[str, dict[str, Any]] = {  # the runner configuration by model
    "silu": {"activation": "silu"},
    "gelu": {"activation": "gelu"},  # Grok
    "situ": {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 5.0},  # Kimi K3
    "gpt-oss": {"activation": "silu", "gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5},
}


def gated(name: str, hidden: Tensor) -> Tensor:
    """The formulas of the models' papers for gate above up (2I,)."""
    gate, up = hidden.chunk(2)
    if name == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "gelu":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    if name == "situ":
        return 3 * torch.tanh(gate / 3) * torch.sigmoid(gate) * 5 * torch.tanh(up / 5)
    gate, up = hidden[::2].clamp(max=0.5), hidden[1::2].clamp(-0.5, 0.5)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def make_layer(name: str, biased: bool, generator: torch.Generator) -> SimpleNamespace:
    config = {"gemm1_alpha": None, "gemm1_clamp_limit": None, **RUNS[name]}
    layer = SimpleNamespace(
        moe_runner_config=SimpleNamespace(**config),
        w13_weight=torch.randn(len(ROWS), 2 * INNER, HIDDEN, generator=generator),
        w2_weight=torch.randn(len(ROWS), HIDDEN, INNER, generator=generator),
    )
    if biased:
        layer.w13_weight_bias = torch.randn(len(ROWS), 2 * INNER, generator=generator)
        layer.w2_weight_bias = torch.randn(len(ROWS), HIDDEN, generator=generator)
    return layer


def expected_output(name: str, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64)
    none = torch.zeros(len(ROWS), 1)
    w13_bias = getattr(layer, "w13_weight_bias", none).double()
    w2_bias = getattr(layer, "w2_weight_bias", none).double()
    for token, chosen in enumerate(ids.tolist()):
        for k, expert in enumerate(chosen):
            if expert >= 0:
                hidden = layer.w13_weight[expert].double() @ x[token].double() + w13_bias[expert]
                output = layer.w2_weight[expert].double() @ gated(name, hidden) + w2_bias[expert]
                total[token] += weights[token, k].double() * output
    return total


@pytest.mark.parametrize(
    ("name", "biased"),
    [("silu", False), ("silu", True), ("gelu", False), ("situ", False), ("gpt-oss", True)],
)
def test_every_assignment_counts_once_however_many_rows_an_expert_has(
    name: str, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS))
    ids = ids[torch.randperm(ids.numel(), generator=generator)].view(-1, TOP_K)
    ids[::7] = -1  # another rank's
    x = torch.randn(ids.shape[0], HIDDEN, generator=generator)
    weights = torch.rand(ids.shape, generator=generator)
    layer = make_layer(name, biased, generator)

    with torch.compiler.set_stance("force_eager"):  # SGLang compiles the one of gpt-oss
        found = compute(layer, x, weights, ids.int())

    expected = expected_output(name, layer, x, weights, ids)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_models_in_bfloat16_are_computed_in_float32_where_that_is_emulated(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend(monkeypatch.setattr, name)
    generator = torch.Generator().manual_seed(0)
    layer = make_layer("silu", False, generator)
    layer.w13_weight, layer.w2_weight = layer.w13_weight.bfloat16(), layer.w2_weight.bfloat16()
    x = torch.randn(64, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(64, TOP_K, generator=generator)
    ids = torch.randint(-1, len(ROWS), weights.shape, generator=generator)
    expected = expected_output("silu", layer, x, weights, ids)
    error = (compute(layer, x, weights, ids.int()) - expected).norm() / expected.norm()
    assert error < (0.01 if INSTRUCTION_SETS[name].bfloat16 else 0.003)


def test_long_batches_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes itself, its output, and that in float32."""
    generator, most, parts = torch.Generator().manual_seed(0), 100, list[int]()
    layer = make_layer("silu", False, generator)
    x, weights = torch.randn(400, HIDDEN, generator=generator), torch.ones(400, TOP_K)
    ids = torch.randint(-1, len(ROWS), weights.shape, generator=generator)
    together = compute(layer, x, weights, ids.int())
    by_expert = host.by_expert

    def counted(*given: Any) -> Tensor:
        parts.append(len(given[2]))
        return by_expert(*given)

    monkeypatch.setattr(host, "by_expert", counted)
    monkeypatch.setattr(cpu_experts, "_MOST_BYTES", most * 3 * 4 * HIDDEN)
    torch.testing.assert_close(compute(layer, x, weights, ids.int()), together)
    assert max(parts) == most
    assert sum(parts) == (ids >= 0).sum()


def test_every_activation_is_compared() -> None:
    assert {runs["activation"] for runs in RUNS.values()} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("policy", [Policy.QUOTA, Policy.OFF])
def test_quantised_experts_are_refused_by_name_before_they_are_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: Policy
) -> None:
    pretend(monkeypatch.setattr, name)
    monkeypatch.setattr(hooks, "is_cpu", lambda: True)
    own = hooks._SchedulerHooks(BalanceConfig(policy=policy))
    monkeypatch.setattr(own, "loaded", lambda runner: seen.append("taken over"))
    seen: list[str] = []
    described = SimpleNamespace(
        quantization="fp8", model_path="some/model", hf_config=SimpleNamespace()
    )
    runner = SimpleNamespace(
        model_config=described, server_args=SimpleNamespace(ep_size=2), is_draft_worker=True
    )
    with pytest.raises(UnsupportedError, match=r"is quantised \(fp8\).* AVX.*; drop --quant"):
        own.load(lambda runner: seen.append("loaded"), runner)
    described.hf_config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedError, match=r"; use an unquantised checkpoint$"):
        own.load(lambda runner: seen.append("loaded"), runner)
    assert seen == []
    described.quantization = None
    own.load(lambda runner: seen.append("loaded"), runner)
    assert seen == ["loaded", "taken over"]


def test_experts_are_computed_where_nothing_is_balanced_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = make_layer("silu", False, generator)
    layer.w13_weight, layer.w2_weight = layer.w13_weight.bfloat16(), layer.w2_weight.bfloat16()
    layer.moe_ep_size = 2
    monkeypatch.setattr(hooks, "is_cpu", lambda: True)
    own = hooks._SchedulerHooks(BalanceConfig(policy=Policy.OFF))
    own.loaded(SimpleNamespace(model=torch.nn.ModuleList(), is_draft_worker=False))
    x = torch.randn(64, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(64, TOP_K, generator=generator)
    ids = torch.randint(-1, len(ROWS), weights.shape, generator=generator)
    chosen = SimpleNamespace(topk_weights=weights, topk_ids=ids.int())
    found = own.compute(pytest.fail, layer, x, chosen, None)
    expected = expected_output("silu", layer, x, weights, ids)
    assert found.dtype == torch.float32  # a part of the sum, rounded when it is complete
    assert (found - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize(
    ("dtype", "tokens", "found"),
    [
        (torch.bfloat16, 8, [256.0, 0.0]),  # rounded once, by the first rank
        (torch.bfloat16, 7, [254.0, 1.5]),  # SGLang adds these up
        (torch.float32, 8, [254.5, 1.5]),
    ],
)
def test_sums_of_large_batches_are_complete_before_they_are_rounded(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int, found: list[float]
) -> None:
    parts = [torch.full((tokens, 1), value) for value in (254.5, 1.5)]
    monkeypatch.setattr(StandardDispatcher, "combine", lambda self, part: part)
    combined = []
    for rank, part in enumerate(parts):
        dispatcher: Any = HostDispatcher.__new__(HostDispatcher)
        dispatcher._dtype, dispatcher._min_batch_tokens = dtype, 8
        group = SimpleNamespace(all_reduce=lambda _: parts[0] + parts[1], rank_in_group=rank)
        ranks = SimpleNamespace(moe_ep_group=group)
        monkeypatch.setattr(host, "get_parallel", lambda ranks=ranks: ranks)
        combined.append(dispatcher.combine(part.clone()))
    assert {output.dtype for output in combined} == {dtype}
    assert [float(output[0]) for output in combined] == found
