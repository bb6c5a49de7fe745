"""The GPU side of the vLLM adapter, on vLLM's own objects; transports and kernels are stand-ins."""
# ruff: noqa: TID251 - vLLM's own objects are what is tested

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm_fakes as fakes
    from vllm.config import VllmConfig
    from vllm.config.parallel import All2AllBackend
    from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_kernels
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    from ultraep_serve.adapters.vllm import checks, group, routed_experts

from ultraep_serve.config import BalanceConfig, child_environment
from ultraep_serve.costs.model import CostModel
from ultraep_serve.cuda.recording import is_capturing
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.testing.ranks import fresh_run_path, run_ranks
from ultraep_serve.types import Policy

NUM_RANKS, NUM_SLOTS, THRESHOLD = 3, 2, 48
NUM_MASTERS = fakes.NUM_EXPERTS // NUM_RANKS
NUM_LOCAL = NUM_MASTERS + NUM_SLOTS
BACKENDS = (fakes.TENSOR, *checks._ALL2ALL_BACKENDS)
NAMES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
ALWAYS_PAYS = CostModel(
    seconds_per_assignment=1.0, bytes_per_expert=1, link_bytes_per_second=1e12
).to_json()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The adapter as on a GPU, with the reference kernels; patches are undone."""
    monkeypatch.setattr(group, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(routed_experts, "_layers", [])
    fakes.use_reference_kernels(monkeypatch.setattr)
    for name in ("_EP", "_DP", "_TP", "_PCP", "_NODE_COUNT"):
        monkeypatch.setattr(fakes.parallel_state, name, None)
    fakes.join_ranks(0, NUM_RANKS, "allgather_reducescatter")
    return monkeypatch.setattr


def configure(set_variable: Callable[[str, str], object], **settings: Any) -> None:
    config = BalanceConfig(**settings)
    set_variable("ULTRAEP_CONFIG", child_environment(config, {})["ULTRAEP_CONFIG"])


@contextmanager
def forward_pass(config: VllmConfig, tokens_by_rank: list[int] | None) -> Iterator[None]:
    """One batch of vLLM's, with the number of tokens of every data-parallel rank."""
    metadata = DPMetadata(torch.tensor(tokens_by_rank)) if tokens_by_rank else None
    with override_forward_context(create_forward_context(None, config, metadata)):
        if metadata is None:
            yield
        else:
            with metadata.sp_local_sizes(1):
                yield


# What every rank does with one way of dispatch; the results are compared by the tests below.


def serve_on_rank(rank: int, run_dirs: list[str]) -> list[dict[str, Any]]:
    store = dist.FileStore(f"{run_dirs[0]}/gloo", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    fakes.install_deep_ep()
    fakes.use_reference_kernels(setattr)
    setattr(group, "current_platform", SimpleNamespace(is_cpu=lambda: False))  # noqa: B010
    return [
        serve_through(backend, rank, run_dir)
        for backend, run_dir in zip(BACKENDS, run_dirs, strict=True)
    ]


def serve_through(backend: str, rank: int, run_dir: str) -> dict[str, Any]:
    configure(
        os.environ.__setitem__,
        run_dir=run_dir,
        num_replica_slots=NUM_SLOTS,
        min_batch_tokens=THRESHOLD,
        costs=ALWAYS_PAYS,
    )
    routed_experts._layers.clear()
    fakes.Buffer.destroyed, fakes.Buffer.made = 0, []
    fakes.join_ranks(rank, NUM_RANKS, backend)
    config = fakes.engine_config(rank, NUM_RANKS, backend, NAMES)
    parallel = fakes.parallel_of(rank, NUM_RANKS, backend)
    layers = [fakes.build_layer(config, parallel, name) for name in NAMES]
    weights = [fakes.make_weights(seed) for seed in range(len(NAMES))]
    for layer, tensors in zip(layers, weights, strict=True):
        fakes.load(layer, config, tensors)
    sizes = {"large": 60, "dummy": 60 if rank or not backend else 1, "small": 2}
    found: dict[str, Any] = {
        name: [
            run_batch(backend, rank, config, layer, tensors, size)
            for layer, tensors in zip(layers, weights, strict=True)
        ]
        for name, size in sizes.items()
    }
    layers[0]._group._run_layer(layers[0]._group._joined.shape, 200 * NUM_LOCAL)
    stage = layers[0].quant_method.moe_kernel.prepare_finalize
    return {
        **found,
        "stage": type(stage).__name__,
        "rows": [tuple(layer.w13_weight.shape[:1]) for layer in layers],
        "map": layers[0].expert_map.tolist(),
        "offset": getattr(stage, "rank_expert_offset", None),
        "made": [made["num_rdma_bytes"] for made in fakes.Buffer.made],
        "destroyed": fakes.Buffer.destroyed,
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
    batch = fakes.make_batch(rank if backend else 0, num_tokens, ids_type)
    tokens_by_rank = None if backend == fakes.TENSOR else fakes.everywhere(num_tokens)
    taken = []
    method, apply = layer.quant_method, layer.quant_method.apply
    method.apply = lambda **call: (taken.append(call["topk_ids"]), apply(**call))[1]
    with forward_pass(config, tokens_by_rank):
        output = layer.forward_modular(batch.x, batch.weights, batch.ids).float()
    method.apply = apply
    if backend == fakes.TENSOR:  # vLLM's runner adds up
        output = sum(part for part in fakes.everywhere(output))
    expected = fakes.expected_output(batch, tensors)
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
    with fresh_run_path() as path:
        run_dirs = [path / str(index) for index in range(len(BACKENDS))]
        for run_dir in run_dirs:
            run_dir.mkdir(mode=0o700)
        found = run_ranks(serve_on_rank, NUM_RANKS, [str(d) for d in run_dirs], timeout_seconds=400)
    return {backend: [ranks[i] for ranks in found] for i, backend in enumerate(BACKENDS)}


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
    stages = ("NoDPEP", "NaiveDPEP", "DeepEPHT", "DeepEPLL")
    for rank, result in enumerate(served[backend]):
        first = rank * NUM_LOCAL
        expected = [
            i - first if first <= i < first + NUM_LOCAL else -1
            for i in range(NUM_RANKS * NUM_LOCAL)
        ]
        assert result["map"] == expected
        assert result["rows"] == [(NUM_LOCAL,)] * len(NAMES)
        assert stages[BACKENDS.index(backend)] in result["stage"]
        if backend == "deepep_high_throughput":
            assert result["offset"] == first


def test_buffers_made_for_logical_experts_are_destroyed(served: Any) -> None:
    for result in served["deepep_low_latency"]:
        assert result["made"] == [fakes.NUM_EXPERTS, NUM_RANKS * NUM_LOCAL]
        assert result["destroyed"] == 1
    for result in served["deepep_high_throughput"]:  # does not depend on their number
        assert len(result["made"]) == 1
        assert result["destroyed"] == 0


# What one process can see.


def one_scale_per_expert(weight: Any, scale: torch.Tensor, *_: Any, **__: Any) -> Any:
    """vLLM's requantisation, which needs a GPU, as far as shapes go."""
    return weight, scale.max(dim=1).values


def build(set_attribute: Any, backend: str = "allgather_reducescatter", **options: Any) -> Any:
    """A layer of rank 0 and its configuration, weights loaded, not yet balanced."""
    set_attribute(fp8, "process_fp8_weight_tensor_strategy_moe", one_scale_per_expert)
    config = options.pop("config", None) or fakes.engine_config(0, NUM_RANKS, backend, NAMES)
    quant_config = options.pop("quant_config", None)
    parallel = options.pop("parallel", None) or fakes.parallel_of(0, NUM_RANKS, backend)
    layer = fakes.build_layer(config, parallel, NAMES[0], quant_config)
    with fakes.set_current_vllm_config(config):
        for parameter in layer.parameters():
            parameter.data.fill_(1)
        layer.quant_method.process_weights_after_loading(layer)
    return layer, config


def refusal(layer: Any, config: VllmConfig) -> str:
    with pytest.raises(UnsupportedError) as error:
        checks.check_device_execution(layer, config)
    assert "--on-unsupported=off" in str(error.value)
    return str(error.value)


@pytest.fixture
def balanced(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    configure(monkeypatch.setenv, num_replica_slots=NUM_SLOTS, run_dir="/dev/null")
    return on_gpu


def test_accepted_names_are_vllms_own() -> None:
    assert set(checks._ALL2ALL_BACKENDS) <= set(get_args(All2AllBackend))
    names = ("TRITON", "BATCHED_TRITON", "DEEPGEMM", "BATCHED_DEEPGEMM", "FLASHINFER_CUTLASS")
    kernels = {
        kernel.__name__
        for name in names
        for kernel in fp8_kernels.backend_to_kernel_cls(fp8_kernels.Fp8MoeBackend[name])
    }
    assert kernels == set(checks._EXPERT_KERNELS)
    triton = unquantized.UnquantizedMoeBackend.TRITON
    assert unquantized.backend_to_kernel_cls(triton)[0].__name__ in checks._EXPERT_KERNELS
    assert {Fp8MoEMethod.__name__, "UnquantizedFusedMoEMethod"} == set(checks._QUANTISATIONS)


def test_what_is_verified_is_accepted(balanced: Any) -> None:
    layer, config = build(balanced)
    checks.check_device_execution(layer, config)


@pytest.mark.parametrize(
    "backend", sorted(set(get_args(All2AllBackend)) - set(checks._ALL2ALL_BACKENDS))
)
def test_other_dispatch_is_refused_by_name(balanced: Any, backend: str) -> None:
    layer, config = build(balanced)
    layer.moe_config.moe_parallel_config.all2all_backend = backend
    message = refusal(layer, config)
    assert f"dispatch through {backend} has not been verified" in message
    assert "use --all2all-backend allgather_reducescatter" in message


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("parallel_config", "enable_dbo", True, "drop --enable-dbo"),
        ("parallel_config", "ubatch_size", 2, "drop --enable-dbo and --ubatch-size"),
        ("parallel_config", "enable_elastic_ep", True, "drop --enable-elastic-ep"),
        ("", "lora_config", object(), "drop --enable-lora"),
        ("", "model_config", SimpleNamespace(enable_sleep_mode=True), "drop --enable-sleep-mode"),
    ],
)
def test_settings_that_do_not_go_with_slots(
    balanced: Any, section: str, name: str, value: object, remedy: str
) -> None:
    layer, config = build(balanced)
    object.__setattr__(getattr(config, section) if section else config, name, value)
    assert remedy in refusal(layer, config)


def test_several_hosts_are_refused(balanced: Any) -> None:
    layer, config = build(balanced)
    balanced(fakes.parallel_state, "_NODE_COUNT", 2)
    assert "use expert parallelism on one host" in refusal(layer, config)


@pytest.mark.parametrize(
    ("stages", "numbers", "message"),
    [(2, (8, 8), "--pipeline-parallel-size 1"), (1, (8, 16), r"experts \[8, 16\] share no slots")],
)
def test_what_is_not_one_group_is_refused(stages: int, numbers: Any, message: str) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))
    layers = [SimpleNamespace(global_num_experts=number) for number in numbers]
    with pytest.raises(UnsupportedError, match=message):
        checks.check_model(config, layers)  # type: ignore[arg-type]  # these fields are enough


def test_tensor_and_data_parallelism_need_tokens_of_their_own(balanced: Any) -> None:
    """Two engines of two ranks: with sequence parallelism each of the four has its own tokens."""
    own = fakes.parallel_of(0, 4, "allgather_reducescatter", tensor_size=2)
    layer, config = build(balanced, parallel=own)
    checks.check_device_execution(layer, config)
    own.sp_size = 1
    assert "count them more than once" in refusal(layer, config)


def test_context_parallelism_is_refused(balanced: Any) -> None:
    layer, config = build(balanced)
    layer.moe_config.moe_parallel_config.pcp_size = 2
    assert "--prefill-context-parallel-size 1" in refusal(layer, config)


def test_kernels_that_route_themselves_are_refused(balanced: Any) -> None:
    layer, config = build(balanced)
    layer.quant_method.moe_kernel = SimpleNamespace(is_monolithic=True)
    assert "use --moe-backend triton" in refusal(layer, config)
    layer.quant_method.moe_kernel = SimpleNamespace(is_monolithic=False, fused_experts=object())
    assert "expert kernel object has not been verified" in refusal(layer, config)


def test_other_quantisations_are_refused(balanced: Any) -> None:
    layer, config = build(balanced)
    balanced(checks, "_QUANTISATIONS", ())
    assert "quantisation UnquantizedFusedMoEMethod has not been verified" in refusal(layer, config)


def test_offloaded_weights_are_refused(balanced: Any) -> None:
    layer, config = build(balanced)
    balanced(checks, "current_platform", SimpleNamespace(device_type="cuda"))
    assert "drop --cpu-offload-gb" in refusal(layer, config)


def test_eplb_is_refused(balanced: Any) -> None:
    layer, _ = build(balanced)
    layer.moe_config.moe_parallel_config.enable_eplb = True
    with pytest.raises(UnsupportedError, match="drop it"):
        checks.check_layer(layer)


def fp8_config(scheme: str, block: list[int] | None) -> Fp8Config:
    return Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme=scheme, weight_block_size=block
    )


@pytest.mark.parametrize("block", [[16, 128], None], ids=["block", "tensor"])
def test_fp8_scales_move_with_the_weights(balanced: Any, block: list[int] | None) -> None:
    """They are the layer's parameters, in the kernel's configuration too, so they move in place."""
    balanced(fp8, "resolve_fp8_moe_weight_block_shape", lambda *_: (block, None), raising=False)
    layer, config = build(balanced, quant_config=fp8_config("dynamic", block))
    checks.check_device_execution(layer, config)
    parameters = group._expert_parameters(layer)
    suffix = "weight_scale_inv" if block else "weight_scale"
    moving = {name for name, own in layer.named_parameters() if any(own is p for p in parameters)}
    assert moving == {"w13_weight", "w2_weight", f"w13_{suffix}", f"w2_{suffix}"}

    shape = group.ExpertShape(NUM_RANKS, fakes.NUM_EXPERTS, NUM_SLOTS)
    execution = layer._group._execution
    with fakes.set_current_vllm_config(config):
        execution.give_slots([layer], shape)
        for parameter in parameters:
            parameter.data = parameter.data.new_zeros(NUM_LOCAL, *parameter.shape[1:])
        experts = layer.quant_method.moe_kernel.fused_experts
        assert experts.w1_scale.shape[0] == experts.w2_scale.shape[0] == NUM_LOCAL
        execution.take_slots_back([layer], [parameters], shape)
    assert layer.w13_weight.shape[0] == experts.w1_scale.shape[0] == NUM_MASTERS
    assert layer.global_num_experts == layer.expert_map.numel() == fakes.NUM_EXPERTS


def test_what_a_kernel_computed_from_the_experts_is_refused(balanced: Any) -> None:
    layer, config = build(balanced, quant_config=fp8_config("dynamic", None))
    method, made = layer.quant_method, layer.quant_method.get_fused_moe_quant_config

    def derived(of: Any) -> Any:
        found = made(of)
        found._w1.alpha_or_gscale = of.w13_weight_scale * 2
        return found

    method.get_fused_moe_quant_config = derived
    shape = group.ExpertShape(NUM_RANKS, fakes.NUM_EXPERTS, NUM_SLOTS)
    with (
        fakes.set_current_vllm_config(config),
        pytest.raises(UnsupportedError, match=r"alpha_or_gscale .*--moe-backend triton"),
    ):
        layer._group._execution.give_slots([layer], shape)


def test_static_activation_scales_are_refused(balanced: Any) -> None:
    layer, config = build(balanced, quant_config=fp8_config("static", None))
    assert "dynamic activation scales" in refusal(layer, config)


def test_tensors_outside_vllms_contract_are_refused(balanced: Any) -> None:
    layer, _ = build(balanced)
    layer.register_parameter("w13_input_scale", torch.nn.Parameter(torch.ones(NUM_MASTERS)))
    with pytest.raises(UnsupportedError, match=r"w13_input_scale .* cannot be moved"):
        group._expert_parameters(layer)
    layer.w2_weight.data = layer.w2_weight.data.transpose(1, 2)
    with pytest.raises(UnsupportedError, match="--moe-backend triton"):
        group._expert_parameters(layer)


def test_batches_are_judged_by_all_ranks_tokens_and_captured_ones_not(balanced: Any) -> None:
    layer, config = build(balanced)
    seen: list[int] = []
    route = lambda index, ids, tokens, real: seen.append(tokens) or ids.int()  # noqa: E731
    layer._group._layers, layer._group._joined = [layer], SimpleNamespace(route=route)
    ids = torch.zeros(8, fakes.TOP_K, dtype=torch.int64)
    with forward_pass(config, [300, 8, 1]):
        assert layer._group.route(0, ids, 8).dtype == torch.int64  # as the router gave them
        balanced(group, "is_capturing", lambda _: True)
        layer._group.route(0, ids, 8)
    assert seen == [309, 0]
    balanced(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing(torch.device("cuda"))
    assert not is_capturing(ids.device)


def test_requests_of_a_rank_are_told_from_padding(balanced: Any) -> None:
    """With sequence parallelism 10 tokens on two ranks of 8 rows are 8 and 2."""
    own = fakes.parallel_of(1, 4, "allgather_reducescatter", tensor_size=2)
    layer, config = build(balanced, parallel=own)
    layer._group._layers = [layer]
    metadata = {"linear": object(), "attention": SimpleNamespace(num_actual_tokens=10)}
    with override_forward_context(create_forward_context(metadata, config)):
        for rank, tokens in enumerate((8, 2)):
            balanced(group, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            assert layer._group._request_tokens(8) == tokens
        own.sp_size = 1
        assert layer._group._request_tokens(8) == 10
    with override_forward_context(create_forward_context(None, config)):
        assert layer._group._request_tokens(8) == 0  # a dummy batch


def test_unsupported_models_are_served_by_vllm_alone(
    balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch.setenv, on_unsupported="off", run_dir="/dev/null")
    config = fakes.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer, _ = build(balanced, config=config)
    config.parallel_config.enable_dbo = True
    layer.update_param_tp_status()
    ids = torch.tensor([[3, -1]])
    assert layer._group.route(0, ids, 1) is ids
    layer._group.computed()
    assert layer.global_num_experts == fakes.NUM_EXPERTS


def test_draft_models_are_refused(balanced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch.setenv, on_unsupported="off", run_dir="/dev/null")
    config = fakes.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer, _ = build(balanced, config=config)
    config.parallel_config.enable_dbo = True
    layer.update_param_tp_status()
    config.compilation_config.static_all_moe_layers.append("draft")
    with pytest.raises(UnsupportedError, match="draft models"):
        layer.update_param_tp_status()
    layer._group._joined = object()
    other = fakes.engine_config(0, NUM_RANKS, "allgather_reducescatter", ["draft"])
    with pytest.raises(UnsupportedError, match="draft models"):
        build(balanced, config=other)


def test_policy_off_leaves_vllm_on_a_gpu_untouched(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_experts, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delitem(op_registry_oot, "RoutedExperts", raising=False)
    configure(monkeypatch.setenv, policy=Policy.OFF)
    routed_experts.substitute()
    assert "RoutedExperts" not in op_registry_oot


@pytest.mark.parametrize(
    ("is_cpu", "cls"),
    [(True, routed_experts.CpuRoutedExperts), (False, routed_experts.DeviceRoutedExperts)],
)
def test_each_platform_has_its_own_layer(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, cls: type
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: is_cpu, is_cuda=lambda: not is_cpu)
    monkeypatch.setattr(routed_experts, "current_platform", platform)
    monkeypatch.setattr(checks, "current_platform", platform)
    monkeypatch.delitem(op_registry_oot, "RoutedExperts", raising=False)
    configure(monkeypatch.setenv)
    routed_experts.substitute()
    assert op_registry_oot.pop("RoutedExperts") is cls


def test_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm")
    monkeypatch.setattr(checks, "current_platform", platform)
    with pytest.raises(UnsupportedError, match="rocm is not there yet"):
        checks.check_engine()
