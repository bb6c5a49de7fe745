"""The GPU side of the SGLang adapter, on SGLang's own objects; transports and kernels stand in."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

import torch.distributed as dist

from tests.emulated_gpu.references.deep_ep import Buffer, everywhere

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    from tests.support import sglang_fakes as fakes  # has what SGLang looks for

    # isort: split
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        breakable_cuda_graph,
        enable_breakable_cuda_graph,
    )
    from sglang.srt.runtime_context import get_parallel, get_server_args

    from ultraep_serve.engines.sglang import hooks

from tests.support.experts import ALWAYS_PAYS, expected_output, make_batch, make_weights
from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import run_settings
from ultraep_serve.config import BalanceConfig

NUM_RANKS, NUM_SLOTS = fakes.SHAPE.num_ranks, fakes.SHAPE.num_replica_slots
NUM_MASTERS, NUM_LOCAL = fakes.SHAPE.num_masters, fakes.SHAPE.num_local
THRESHOLD, NUM_LAYERS = 48, 2
SETTINGS: dict[str, dict[str, Any]] = {  # by what is tested
    "tensor": {},
    "global ids": {"moe_runner_backend": "flashinfer_cutlass"},
    "gathered": {"attn_dp_size": NUM_RANKS},
    "deepep normal": {**fakes.DEEPEP, "deepep_mode": "normal"},
    "deepep low latency": {**fakes.DEEPEP, "deepep_mode": "low_latency"},
    "deepep auto": {**fakes.DEEPEP, "deepep_mode": "auto"},
    "deepep, prefill in graphs": {**fakes.DEEPEP, "cuda_graph_backend_prefill": "breakable"},
}
OWN = [name for name, changes in SETTINGS.items() if "moe_a2a_backend" in changes]
EXTEND, DECODE, IDLE = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE
BATCHES: dict[str, tuple[tuple[Any, int], tuple[Any, int]]] = {  # of rank 0, and of the others
    "large": ((EXTEND, 60), (EXTEND, 60)),
    "small": ((EXTEND, 2), (EXTEND, 2)),
    "decode": ((DECODE, 60), (DECODE, 60)),
    "idle rank": ((IDLE, 0), (EXTEND, 60)),
    "one decodes": ((DECODE, 3), (EXTEND, 60)),
}


# What every rank does under some settings; the results are compared by the tests below.


def serve_on_rank(rank: int, run_dirs: list[str]) -> list[dict[str, Any]]:
    engine_group(run_dirs[0], rank, NUM_RANKS)
    fakes.pretend_gpu(setattr)
    return [
        serve_under(changes, rank, run_dir)
        for changes, run_dir in zip(SETTINGS.values(), run_dirs, strict=True)
    ]


def serve_under(changes: dict[str, Any], rank: int, run_dir: str) -> dict[str, Any]:
    meet_in(run_dir)
    server_args = fakes.publish(rank, **changes)
    Buffer.made = []
    layers = [fakes.build_layer(index) for index in range(NUM_LAYERS)]
    weights = [make_weights(index, fakes.HIDDEN, fakes.INNER) for index in range(NUM_LAYERS)]
    for layer, tensors in zip(layers, weights, strict=True):
        fakes.load(layer, tensors)
    config = BalanceConfig(
        slots=NUM_SLOTS,
        min_batch_tokens=THRESHOLD,
        costs=ALWAYS_PAYS,
    )
    own = hooks._SchedulerHooks(config)
    fakes.in_registry(own, hooks.GATHER)
    model = torch.nn.ModuleList(layers)
    own.loaded(SimpleNamespace(is_draft_worker=False, server_args=server_args, model=model))
    found: dict[str, Any] = {
        name: run_batch(own, layers, weights, *BATCHES[name][min(rank, 1)])
        for name in batches_of(changes)
    }
    own._check_adopted(model)
    assert own._balanced is not None
    return {
        **found,
        "rows": [weights.parameters[0].shape[0] for weights in own._balanced._held],
        "made": Buffer.made,
        "view": own._balanced._setup.view.value,
    }


def batches_of(changes: dict[str, Any]) -> list[str]:
    """Ranks differ in their batches only with attention data parallelism."""
    return [
        name
        for name, (first, others) in BATCHES.items()
        if changes.get("attn_dp_size") or first == others
    ]


def run_batch(
    own: hooks._SchedulerHooks,
    layers: list[Any],
    weights: list[dict[str, torch.Tensor]],
    mode: ForwardMode,
    num_tokens: int,
) -> list[dict[str, Any]]:
    """One forward pass of this rank's ``num_tokens``, as its scheduler would run it."""
    info = fakes.gather(mode, num_tokens)
    batch = SimpleNamespace(
        forward_mode=mode,
        extend_num_tokens=num_tokens if mode is EXTEND else None,
        is_extend_in_batch=info.is_extend_in_batch,
    )
    set_is_extend_in_batch(info.is_extend_in_batch)
    run_layers = lambda runner, batch: [  # noqa: E731
        run_layer(held, tensors, num_tokens, info)
        for held, tensors in zip(own._balanced._held, weights, strict=True)
    ]
    found: list[dict[str, Any]] = own.forward(
        run_layers, SimpleNamespace(is_draft_worker=False, model=torch.nn.ModuleList(layers)), batch
    )
    return found


def run_layer(
    held: Any, tensors: dict[str, torch.Tensor], num_tokens: int, info: MLPSyncBatchInfo
) -> dict[str, Any]:
    """How far the layer's output is from what all experts at home give, and the ids it took."""
    layer = held.layer
    owns_tokens = type(layer).__name__ == "DeepEPMoE"
    rank = dist.get_rank()
    total = sum(info.global_num_tokens) if get_parallel().attn_dp_size > 1 else num_tokens
    tokens = num_tokens if owns_tokens else total
    batch = make_batch(rank if owns_tokens else 0, tokens, fakes.HIDDEN)
    taken = []
    dispatch = layer.dispatcher._original_dispatch_func  # behind the hooks
    layer.dispatcher._original_dispatch_func = lambda **call: (
        taken.append(call["topk_output"].topk_ids),
        dispatch(**call),
    )[1]
    call = layer
    if info.local_forward_mode == EXTEND.value and get_server_args().cuda_graph_backend_prefill:
        call = in_graph(layer, batch.x, fakes.topk_of(batch))
        assert not taken, "what is captured would serve every batch"
    output = call(batch.x, fakes.topk_of(batch)).float()
    layer.dispatcher._original_dispatch_func = dispatch
    if not owns_tokens:  # SGLang's models add up
        output = sum(everywhere(output))
    (physical,), logical = taken, batch.ids
    padding = logical < 0
    return {
        "error": far_off(output, expected_output(batch, tensors)),
        "type": physical.dtype,
        "on_slots": int((physical % NUM_LOCAL >= NUM_MASTERS)[~padding].sum()),
        "padding_kept": bool(((physical == -1) == padding).all()),
    }


def in_graph(layer: Any, *captured: Any) -> Any:
    """``layer`` as SGLang's breakable graphs replay it: what runs between their parts."""
    graph = breakable_cuda_graph.BreakableCUDAGraph()
    nothing = lambda: None  # noqa: E731
    capture = SimpleNamespace(
        cuda_graph=graph,
        _barrier_fn=nothing,
        _end_current_segment=nothing,
        _begin_new_segment=nothing,
    )
    token = breakable_cuda_graph._current_capture_var.set(capture)
    with enable_breakable_cuda_graph():
        output = layer(*captured)
    breakable_cuda_graph._current_capture_var.reset(token)
    (replay,) = graph._break_fns
    return lambda *_: (replay(), output)[1]


def far_off(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    if not expected.numel():
        return 0.0
    return float((output - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def served() -> dict[str, list[dict[str, Any]]]:
    """Results by settings and rank."""
    return run_settings(serve_on_rank, NUM_RANKS, SETTINGS)


def of_batch(served: Any, name: str, batch: str) -> list[dict[str, Any]]:
    """Every layer of every rank."""
    return [layer for result in served[name] for layer in result[batch]]


@pytest.mark.parametrize("name", SETTINGS)
def test_replicas_compute_what_their_masters_would(served: Any, name: str) -> None:
    """Every id arrives at the rank and the local expert that it means, by SGLang's own rules."""
    for batch in batches_of(SETTINGS[name]):
        for layer in of_batch(served, name, batch):
            assert layer["error"] < 0.02, batch  # bfloat16
            assert layer["padding_kept"]
            assert layer["type"] == torch.int32
    assert sum(layer["on_slots"] for layer in of_batch(served, name, "large")) > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_decode_and_small_prefill_stay_at_home(served: Any, name: str) -> None:
    for batch in ("small", "decode"):
        assert not any(layer["on_slots"] for layer in of_batch(served, name, batch))


@pytest.mark.parametrize("name", ["gathered", *OWN])
def test_ranks_without_prefill_plan_with_the_others(served: Any, name: str) -> None:
    for batch in ("idle rank", "one decodes"):
        assert any(layer["on_slots"] for layer in of_batch(served, name, batch))


@pytest.mark.parametrize("name", SETTINGS)
def test_layers_are_told_of_all_physical_experts(served: Any, name: str) -> None:
    """DeepEP's buffer too, which low latency makes for a number of experts."""
    for result in served[name]:
        assert result["rows"] == [NUM_LOCAL] * NUM_LAYERS
        assert result["view"] == ("data" if name in OWN else "tensor")
        if name == "deepep low latency":
            assert result["made"] == [NUM_RANKS * NUM_LOCAL]
        assert len(result["made"]) == (name in OWN)
