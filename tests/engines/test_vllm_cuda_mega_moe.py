"""vLLM's native megakernel over masters and slots: one rank's module, over a reference of DeepGEMM.

What ranks answer together is in ``tests/emulated_gpu/mega_moe.py``.
"""

import ast
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import deep_gemm_mega_moe

    import tests.support.vllm_transports as transports
    from tests.support.vllm_gpu import (
        NAMES,
        NUM_MASTERS,
        NUM_RANKS,
        NUM_SLOTS,
        SHAPE,
        replace_device,
    )
    from tests.support.vllm_mega_moe import (
        HIDDEN,
        INNER,
        MAX_TOKENS,
        PADDED,
        build,
        config_of,
        install,
        run_batch,
        tokens_of,
    )
    from ultraep_serve.engines.vllm import checks, layer_checks, mega_moe
    from ultraep_serve.engines.vllm.stage import VllmFlow

from tests.emulated_gpu.references import mega_moe as deep_gemm
from tests.support.experts import NUM_EXPERTS, TOP_K, Noting
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import TokenView

pytestmark = pytest.mark.skipif(
    checks.MEGA_MOE is None, reason="models in this vLLM have modules of their own for it"
)

CPU = SimpleNamespace(device_type="cpu")


def test_the_reference_takes_what_deep_gemm_takes() -> None:
    """By the names in the DeepGEMM that comes with vLLM."""
    source = Path(vllm.__file__).parent / "third_party" / "deep_gemm" / "mega" / "__init__.py"
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name, parameters in deep_gemm.PARAMETERS.items():
        theirs = iter(functions[name])
        assert all(parameter in theirs for parameter in parameters), name  # in this order


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[Any]]:
    """Rank 0's module and configuration, and the ids of every launch."""
    for name in ("_EP", "_DP", "_TP", "_PCP", "_PP", "_WORLD", "_NODE_COUNT"):
        monkeypatch.setattr(parallel_state, name, None)
    transports.join_ranks(0, NUM_RANKS, transports.MEGA)
    for name in ("synchronize", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 0)
    seen: list[Any] = []
    install(lambda ids: seen.append(("launch", int(ids[0, 0]))), monkeypatch.setattr)
    monkeypatch.setattr(deep_gemm, "fp8_fp4_mega_moe", lambda *_, **__: None)
    monkeypatch.setattr(deep_gemm, "everywhere", lambda value, _: [value] * NUM_RANKS)
    monkeypatch.setattr(checks.MEGA_MOE, "_synchronize_first_launch", lambda _: None)
    monkeypatch.setattr(checks.MEGA_MOE, "_symm_buffers", {})
    monkeypatch.setattr(deep_gemm_mega_moe, "current_platform", CPU)
    config = config_of(0, NUM_RANKS)
    layer, _ = build(config, 0)
    return layer, config, seen


def slots_of(layer: Any, seen: list[Any]) -> tuple[Any, ExpertWeights[Any]]:
    """An execution that has given ``layer`` slots, whose flow notes what it is asked."""
    flow: Any = VllmFlow(TokenView.SHARED)
    flow.balancer = Noting(100)
    flow.balancer.seen = seen
    execution: Any = mega_moe._MegaMoe(flow)
    weights = ExpertWeights(layer, mega_moe._experts(layer))
    execution.give_slots([weights], SHAPE)
    for parameter in weights.parameters:
        parameter.data = torch.cat([parameter.data, parameter.data[:NUM_SLOTS]])
    weights.hide_slots(NUM_MASTERS, execution.kernel)
    return execution, weights


def test_every_call_goes_in_order_and_what_is_computed_apart_is_not_balanced(alone: Any) -> None:
    layer, _, seen = alone
    execution, _ = slots_of(layer, seen)
    x, ids = torch.ones(8, HIDDEN).bfloat16(), torch.zeros(8, TOP_K, dtype=torch.int64)
    layer(x, torch.ones(8, TOP_K), ids)
    assert [each[0] for each in seen] == ["route", "receive", "launch", "experts done", "computed"]
    assert seen[2] == ("launch", 100)
    seen.clear()
    many = x.repeat(2 * MAX_TOKENS // 8 + 1, 1)  # vLLM's buffer holds no more than it schedules
    chosen = ids[:1].expand(len(many), -1).int() + 1
    assert execution.compute(layer, many, torch.ones(chosen.shape), chosen).shape == many.shape
    assert seen == [("launch", 1)] * 3
    execution.take_slots([ExpertWeights(layer, [])], SHAPE)
    seen.clear()
    layer(x, torch.ones(8, TOP_K), ids)
    assert seen == [("launch", 0)]
    assert layer.num_experts == NUM_EXPERTS


def test_tokens_that_vllm_has_added_are_no_load(alone: Any) -> None:
    layer, config, seen = alone
    execution, _ = slots_of(layer, seen)
    run_batch(layer, config, "large")
    (routed,) = execution._flow.balancer.routed
    assert (routed[-PADDED:] == -1).all()
    assert torch.equal(routed[:-PADDED], tokens_of(0, "large").ids[:-PADDED])


def test_weights_are_loaded_into_masters_of_a_layer_with_slots(alone: Any) -> None:
    layer, _, seen = alone
    _, weights = slots_of(layer, seen)
    new = torch.full((HIDDEN, INNER // 2), 3, dtype=torch.uint8)
    for expert in range(NUM_EXPERTS):
        parameter = dict(layer.named_parameters())["w2_weight"]
        parameter.weight_loader(parameter, new, f"{NAMES[0]}.w2_weight", "w2", expert)
    (with_slots,) = (own for own in weights.parameters if own.shape[1:] == (HIDDEN, INNER // 2))
    assert (with_slots[:NUM_MASTERS] == 3).all()
    assert not (with_slots[NUM_MASTERS:] == 3).all()


def test_settings_that_do_not_go_with_it_are_refused(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, _ = alone
    replace_device(monkeypatch.setattr)
    config.kernel_config.moe_backend = "deep_gemm_mega_moe"
    config.scheduler_config.max_num_batched_tokens = 8192
    checks.check_settings(config, BalanceConfig(speeds="1.0,0.5,1.0"))
    with pytest.raises(UnsupportedError, match="use --speeds equal, or numbers"):
        checks.check_settings(config, BalanceConfig(speeds="auto"))
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(UnsupportedError, match="drop --enable-return-routed-experts"):
        checks.check_settings(config, BalanceConfig())


@pytest.mark.parametrize(
    ("ranks", "experts", "slots"),
    [(72, 864, 16), (2, 1020, 2)],  # 2,016 of 2,048 in all; 512 on a rank
)
def test_experts_and_slots_fit_the_kernels_counters_before_loading(
    alone: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, experts: int, slots: int
) -> None:
    _, config, _ = alone
    replace_device(monkeypatch.setattr)
    config.kernel_config.moe_backend = "deep_gemm_mega_moe"
    config.scheduler_config.max_num_batched_tokens = 8192
    config.parallel_config.data_parallel_size = ranks
    config.model_config = SimpleNamespace(
        get_num_experts=lambda: experts, max_model_len=8192, enable_sleep_mode=False
    )
    checks.check_settings(config, BalanceConfig(slots=slots))
    with pytest.raises(UnsupportedError, match="use fewer --slots"):
        checks.check_settings(config, BalanceConfig(slots=slots + 1))


def test_formats_that_no_model_has_are_refused(alone: Any) -> None:
    layer, _, _ = alone
    layer_checks.check_mega_moe(layer)
    layer.weight_format = deep_gemm_mega_moe.MEGA_MOE_BF16
    with pytest.raises(UnsupportedError, match="not been verified with experts in bf16"):
        layer_checks.check_mega_moe(layer)


def test_modules_of_the_model_are_found_in_their_order_and_others_of_its_kind_are_not(
    alone: Any,
) -> None:
    layer, config, _ = alone
    other, _ = build(config, 1)
    kind = type("OfAModel", (checks.MEGA_MOE,), {})  # which may compute in another way
    more = kind.__new__(kind)
    torch.nn.Module.__init__(more)
    modules = torch.nn.ModuleList([other, more, layer])
    assert mega_moe.mega_moe_layers(modules) == [other, layer]
