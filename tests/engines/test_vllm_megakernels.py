"""FlashInfer's megakernels over masters and slots, one rank alone; see also the dispatch of three.

vLLM's own code for them runs, over a layer of FlashInfer's that stands in.
"""

import sys
import warnings
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")
pytest.importorskip(
    "vllm.model_executor.layers.fused_moe.experts.flashinfer_moe_ep",
    reason="this vLLM has no megakernels of FlashInfer's",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.flashinfer_moe_ep import _expert_major_bytes

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import (
        NUM_LOCAL,
        NUM_MASTERS,
        NUM_RANKS,
        NUM_SLOTS,
        SHAPE,
        build,
        forward_pass,
    )
    from tests.support.vllm_megakernel import give_megakernel
    from tests.support.vllm_transports import MEGA
    from ultraep_serve.engines.vllm import checks, expert_tensors, layer_checks, megakernel, model
    from ultraep_serve.engines.vllm.stage import VllmFlow

from tests.emulated_gpu.references import flashinfer
from tests.support.experts import NUM_EXPERTS, Noting
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import TokenView


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """``flashinfer.moe_ep``, in a group of which this rank alone brings tokens."""
    there = ModuleType("flashinfer.moe_ep")
    for name in ("BootstrapConfig", "FleetParams", "MegaConfig", "MoEEpMegaLayer", "MoEEpTensors"):
        setattr(there, name, getattr(flashinfer, name))
    there.MoEWeightPack = flashinfer.MoEWeightPack  # type: ignore[attr-defined]
    for name in ("Nvfp4CutedslMegaMoeConfig", "DeepGemmMegaMoeConfig"):
        setattr(there, name, flashinfer.MegaKernelConfig)
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", there)
    monkeypatch.setattr(flashinfer, "everywhere", lambda value, _: [value])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(flashinfer.MoEEpMegaLayer, "live", [])


def built(balanced: Any, **parallel: Any) -> tuple[Any, Any]:
    """Rank 0's layer, whose experts differ."""
    config = vllm_layers.engine_config(0, NUM_RANKS, MEGA, [])
    place = vllm_layers.parallel_of(0, NUM_RANKS, MEGA, **parallel)
    layer, _ = build(
        balanced, config=config, parallel=place, moe_backend=vllm_layers.MEGAKERNEL, backend=MEGA
    )
    for weight in (layer.w13_weight, layer.w2_weight):
        weight.data *= torch.arange(1.0, NUM_MASTERS + 1)[:, None, None].bfloat16()
    give_megakernel(layer, config)
    return layer, config


def over(layer: Any, config: Any) -> tuple[Any, ExpertWeights[Any]]:
    parameters = expert_tensors.expert_parameters(layer)
    execution = model._Layers(config, VllmFlow(TokenView.OWN), None, [layer])  # type: ignore[arg-type]
    return execution, ExpertWeights(layer, parameters)


def computed(layer: Any, config: Any, physical: int) -> torch.Tensor:
    """What a token gives that chooses ``physical`` alone."""
    ids = torch.tensor([[physical, -1]], dtype=torch.int32)
    x = torch.ones(1, vllm_layers.HIDDEN, dtype=torch.bfloat16)
    with set_current_vllm_config(config), forward_pass(config, [1] * NUM_RANKS):
        output: torch.Tensor = layer.forward_modular(x, torch.ones(1, 2), ids)
    return output


def test_rows_of_slots_are_computed_with_and_masters_again_where_slots_are_taken(
    library: None, balanced: Any
) -> None:
    """As in a start that fails late: masters have been moved, what vLLM's kernel read is gone."""
    layer, config = built(balanced)
    layer_checks.check_device_execution(layer, slots=NUM_SLOTS)
    at_home = [computed(layer, config, expert) for expert in range(NUM_MASTERS)]
    assert len({float(output.sum()) for output in at_home}) == NUM_MASTERS
    execution, weights = over(layer, config)
    assert len(weights.parameters) == 6  # with scales of NVFP4
    assert list(expert_tensors._shared_values(layer, weights.parameters)) == []
    with set_current_vllm_config(config):
        execution.give_slots([weights], SHAPE)
    for parameter in weights.parameters:
        before, slots = parameter.data, parameter.data[1 : 1 + NUM_SLOTS].clone()
        parameter.data = torch.cat([before, slots])
        before.untyped_storage().resize_(0)
    for slot in range(NUM_SLOTS):
        output = computed(layer, config, NUM_MASTERS + slot)
        assert torch.equal(output, at_home[1 + slot])
    (made,) = flashinfer.MoEEpMegaLayer.live
    assert made._fleet_params.num_experts == NUM_RANKS * NUM_LOCAL
    for parameter in weights.parameters:
        parameter.data = parameter.data[:NUM_MASTERS].clone()
    execution.take_slots([weights], SHAPE)
    assert [float(computed(layer, config, e).sum()) for e in range(NUM_MASTERS)] == [
        float(output.sum()) for output in at_home
    ]
    (made,) = flashinfer.MoEEpMegaLayer.live
    assert made._fleet_params.num_experts == NUM_EXPERTS


@pytest.mark.parametrize(
    "own",
    [
        torch.zeros(3, 8, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).transpose(1, 2),
        torch.zeros(3, 16, dtype=torch.uint8),  # scales of CuTeDSL's kernel
        torch.zeros(3, 8, 4, dtype=torch.int8),
        torch.zeros(3, 2, 8, dtype=torch.int32).transpose(1, 2),  # of DeepGEMM's, for TMA
    ],
    ids=["FP4", "scales", "packed", "packed scales"],
)
def test_what_vllm_views_as_bytes_is_viewed_back(own: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(_expert_major_bytes(own), requires_grad=False)
    back = megakernel._as_kernel_has_it(parameter, own)
    assert (back.dtype, back.shape, back.stride()) == (own.dtype, own.shape, own.stride())
    assert back.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("own", ["weights", "a scale"])
def test_what_the_kernel_has_beside_its_layer_is_refused(
    library: None, balanced: Any, own: str
) -> None:
    layer, _ = built(balanced)
    parameters = expert_tensors.expert_parameters(layer)
    expert_tensors.shared_values(layer, parameters)
    adapter = layer.quant_method.moe_kernel.fused_experts._adapter
    if own == "weights":
        first, (second, scale) = adapter._mega_layer._transformed
        adapter._mega_layer._transformed = first, (second.clone(), scale)
    else:
        adapter._epilogue = replace(adapter._epilogue, fc2_alpha=adapter._epilogue.fc2_alpha + 0)
    with pytest.raises(UnsupportedError, match="keeps tensors of its experts outside of the"):
        expert_tensors.shared_values(layer, parameters)


def test_the_kernel_launches_with_physical_ids_when_copies_have_arrived(
    library: None, balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, config = built(balanced)
    execution, weights = over(layer, config)
    with set_current_vllm_config(config):
        execution.give_slots([weights], SHAPE)
    for parameter in weights.parameters:
        parameter.data = torch.cat([parameter.data, parameter.data[:NUM_SLOTS]])
    computed(layer, config, 0)
    noting = Noting(NUM_LOCAL)
    layer.quant_method.moe_kernel.prepare_finalize._flow.balancer = noting
    launch = flashinfer.MoEEpMegaLayer.__call__

    def noted(mega: Any, t: Any) -> torch.Tensor:
        noting.seen.append(("kernel", int(t.topk_ids[0, 0])))
        return launch(mega, t)

    monkeypatch.setattr(flashinfer.MoEEpMegaLayer, "__call__", noted)
    computed(layer, config, 0)
    names = [seen if seen[0] == "kernel" else seen[0] for seen in noting.seen]
    assert names == ["route", "receive", ("kernel", NUM_LOCAL), "experts done", "computed"]


def test_one_engine_that_shares_its_tokens_out_counts_them_all(
    balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models do so for megakernels, with tensor parallelism alone; vLLM then tells no numbers."""
    seen: list[Any] = []
    monkeypatch.setattr(model, "start_balancing", lambda *given: seen.append(given))
    for parallel, view, tokens in (
        ({"dp_size": 1, "sp_size": NUM_RANKS}, TokenView.OWN, 8 * NUM_RANKS),
        ({"dp_size": 1, "sp_size": 1}, TokenView.SHARED, 8),
        ({}, TokenView.OWN, 0),  # before engines have agreed on numbers
    ):
        place = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter", **parallel)
        layer, config = build(balanced, parallel=place)
        model.balance(checks.BalanceConfig(), config, [layer])
        _, _, loaded, _, flow = seen.pop()
        assert loaded.view is view
        with forward_pass(config, None):
            assert flow._batch_tokens(torch.zeros(8, 2)) == tokens


def test_no_layer_of_expert_parallel_ranks_leaves_its_sums_to_others(balanced: Any) -> None:
    """Else a balanced stage, which says that it cannot pass such on, would end the server."""
    layer, _ = build(balanced)
    moe: FusedMoEConfig = layer.moe_config
    moe.defer_moe_finalize()
    moe.hidden_dim_unpadded = moe.hidden_dim
    for place in (
        vllm_layers.parallel_of(0, NUM_RANKS, MEGA),
        vllm_layers.parallel_of(0, NUM_RANKS, ""),
    ):
        moe.moe_parallel_config = place
        assert not moe.should_defer_moe_finalize(8)
    moe.moe_parallel_config = vllm_layers.parallel_of(0, 1, "", use_ep=False, tp_size=4)
    assert moe.should_defer_moe_finalize(8)  # without expert parallelism
