"""Batches through every way of dispatch that the vLLM adapter accepts on GPUs, on three ranks."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import VllmConfig, set_current_vllm_config

    import tests.support.vllm_transports as transports
    from tests.support import vllm_layers
    from tests.support.vllm_gpu import (
        NAMES,
        NUM_LOCAL,
        NUM_MASTERS,
        NUM_RANKS,
        NUM_SLOTS,
        forward_pass,
        replace_device,
    )
    from tests.support.vllm_megakernel import give_megakernel
    from ultraep_serve.engines.vllm import layer_checks
    from ultraep_serve.engines.vllm.model import balance
    from ultraep_serve.engines.vllm.stage import BalancedStage

from tests.emulated_gpu.references.deep_ep import ElasticBuffer
from tests.emulated_gpu.references.flashinfer import MoeAlltoAll, MoEEpMegaLayer
from tests.support.experts import (
    ALWAYS_PAYS,
    NUM_EXPERTS,
    expected_output,
    make_batch,
    make_weights,
)
from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import run_settings
from ultraep_serve.config import BalanceConfig

THRESHOLD = 48
EXPANDED, AS_SENT = "deepep_v2", "deepep_v2 with graphs"  # the two layouts of what arrives
MEGA = transports.MEGA
BACKENDS = (transports.TENSOR, *layer_checks._ALL2ALL_BACKENDS, AS_SENT, MEGA)


def serve_on_rank(rank: int, run_dirs: list[str]) -> list[dict[str, Any]]:
    engine_group(run_dirs[0], rank, NUM_RANKS)
    transports.install_libraries()
    replace_device(setattr)
    return [
        serve_through(backend, rank, run_dir)
        for backend, run_dir in zip(BACKENDS, run_dirs, strict=True)
    ]


def serve_through(name: str, rank: int, run_dir: str) -> dict[str, Any]:
    backend = name.partition(" ")[0]
    meet_in(run_dir)
    settings = BalanceConfig(slots=NUM_SLOTS, min_batch_tokens=THRESHOLD, costs=ALWAYS_PAYS)
    transports.Buffer.destroyed, transports.Buffer.made = 0, []
    MoeAlltoAll.workspaces.clear()
    ElasticBuffer.made.clear()
    transports.join_ranks(rank, NUM_RANKS, backend)
    config = vllm_layers.engine_config(rank, NUM_RANKS, backend, NAMES)
    if backend == EXPANDED:
        model = SimpleNamespace(enforce_eager=name == EXPANDED, max_model_len=64)
        object.__setattr__(config, "model_config", model)
    parallel = vllm_layers.parallel_of(rank, NUM_RANKS, backend)
    chosen = {"moe_backend": vllm_layers.MEGAKERNEL} if name == MEGA else {}
    layers = [vllm_layers.build_layer(config, parallel, name, **chosen) for name in NAMES]
    weights = [
        make_weights(seed, vllm_layers.HIDDEN, vllm_layers.INNER) for seed in range(len(NAMES))
    ]
    for layer, tensors in zip(layers, weights, strict=True):
        vllm_layers.load(layer, config, tensors)
        if name == MEGA:
            give_megakernel(layer, config)
    with set_current_vllm_config(config):
        plain = [layer.quant_method.moe_kernel.prepare_finalize for layer in layers]
        balanced = balance(settings, config, layers)
    sizes = {"large": 60, "dummy": 60 if rank or not backend else 1, "small": 2}
    found: dict[str, Any] = {
        name: [
            run_batch(backend, rank, config, layer, tensors, size)
            for layer, tensors in zip(layers, weights, strict=True)
        ]
        for name, size in sizes.items()
    }
    balanced.require_in_place()
    megakernels = [made._fleet_params.num_experts for made in MoEEpMegaLayer.live]
    kernel = layers[0].quant_method.moe_kernel
    stage = kernel.prepare_finalize
    assert isinstance(stage, BalancedStage)
    return {
        **found,
        "stage": type(stage.wrapped).__name__,
        "rows": [layer.quant_method.moe_kernel.impl._weights[0].shape[0] for layer in layers],
        "map": kernel.impl._expert_map.tolist(),
        "offset": getattr(stage, "rank_expert_offset", None),
        "made": transports.Buffer.made,
        "destroyed": transports.Buffer.destroyed,
        "elastic": len(ElasticBuffer.made),
        "workspaces": len(MoeAlltoAll.workspaces),
        "megakernels": megakernels,
        "numbers": [
            getattr(getattr(each, "all2all_manager", None), "num_experts", 0)
            for each in (plain[0], stage)
        ],
    }


def run_batch(
    backend: str,
    rank: int,
    config: VllmConfig,
    layer: Any,
    tensors: dict[str, torch.Tensor],
    num_tokens: int,
) -> dict[str, Any]:
    """How far the layer's output is from what all experts at home give, and the ids it took."""
    ids_type = layer.quant_method.topk_indices_dtype or torch.int32
    batch = make_batch(rank if backend else 0, num_tokens, vllm_layers.HIDDEN, ids_type)
    tokens_by_rank = None if backend == transports.TENSOR else transports.everywhere(num_tokens)
    stage, taken = layer.quant_method.moe_kernel.prepare_finalize.wrapped, []
    name = "prepare_async" if stage.supports_async() else "prepare"
    prepare = getattr(stage, name)
    with pytest.MonkeyPatch.context() as patch, forward_pass(config, tokens_by_rank):
        patch.setattr(
            stage, name, lambda *of, **named: (taken.append(of[2]), prepare(*of, **named))[1]
        )
        output = layer.forward_modular(batch.x, batch.weights, batch.ids).float()
    if backend == transports.TENSOR:  # vLLM's runner adds up
        output = sum(part for part in transports.everywhere(output))
    expected = expected_output(batch, tensors)
    padding = batch.ids < 0
    return {
        "error": float((output - expected).abs().max() / expected.abs().max()),
        "types": (taken[0].dtype, ids_type),
        "on_slots": int((taken[0] % NUM_LOCAL >= NUM_MASTERS)[~padding].sum()),
        "padding_kept": bool((taken[0][padding] == -1).all()) and bool((taken[0] >= -1).all()),
        "has_padding": bool(padding.any()),
    }


@pytest.fixture(scope="module")
def served() -> dict[str, list[dict[str, Any]]]:
    """Results by backend and rank."""
    return run_settings(serve_on_rank, NUM_RANKS, BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda name: name or "tensor")
def test_replicas_compute_what_their_masters_would(served: Any, backend: str) -> None:
    """Every id arrives at the rank and the local expert that it means, by the backend's rule."""
    for result in served[backend]:
        for name in ("large", "dummy", "small"):
            for layer in result[name]:
                assert layer["error"] < 0.02, (backend, name)  # bfloat16
                assert layer["padding_kept"]
                assert layer["types"][0] == layer["types"][1]
    layers = [layer for result in served[backend] for layer in result["large"]]
    assert sum(layer["on_slots"] for layer in layers) > 0
    assert any(layer["has_padding"] for layer in layers)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda name: name or "tensor")
def test_small_batches_stay_at_home_and_dummy_batches_keep_step(served: Any, backend: str) -> None:
    on_slots = {
        name: [layer["on_slots"] for result in served[backend] for layer in result[name]]
        for name in ("small", "dummy")
    }
    assert not any(on_slots["small"])
    if backend:  # the rank with one token plans with the others
        assert any(on_slots["dummy"])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda name: name or "tensor")
def test_layer_is_told_of_all_physical_experts(served: Any, backend: str) -> None:
    stages = ("NoDPEP", "NaiveDPEP", "DeepEPHT", "DeepEPLL", "DeepEPV2", "OneSided", "DeepEPV2")
    stages = (*stages, "PassThrough")
    for rank, result in enumerate(served[backend]):
        first = rank * NUM_LOCAL
        expected = [
            i - first if first <= i < first + NUM_LOCAL else -1
            for i in range(NUM_RANKS * NUM_LOCAL)
        ]
        assert result["map"] == expected
        assert result["rows"] == [NUM_LOCAL] * len(NAMES)
        assert stages[BACKENDS.index(backend)] in result["stage"]
        if backend in ("deepep_high_throughput", EXPANDED, AS_SENT):
            assert result["offset"] == first


def test_buffers_made_for_logical_experts_are_destroyed(served: Any) -> None:
    for result in served["deepep_low_latency"]:
        assert result["made"] == [NUM_EXPERTS, NUM_RANKS * NUM_LOCAL]
        assert result["destroyed"] == 1
    for result in served["deepep_high_throughput"]:  # does not depend on their number
        assert len(result["made"]) == 1
        assert result["destroyed"] == 0
    for result in served[EXPANDED]:  # nor do these
        assert result["elastic"] == 1


def test_megakernels_are_made_again_once_for_slots_and_those_without_are_destroyed(
    served: Any,
) -> None:
    for result in served[MEGA]:
        assert result["megakernels"] == [NUM_RANKS * NUM_LOCAL] * len(NAMES)


def test_one_sided_communication_is_for_as_many_experts_as_its_layers_have(served: Any) -> None:
    """One for layers without slots, such as a draft's, and one with, over the same workspace."""
    for result in served["flashinfer_nvlink_one_sided"]:
        assert result["numbers"] == [NUM_EXPERTS, NUM_RANKS * NUM_LOCAL]
        assert result["workspaces"] == 1
