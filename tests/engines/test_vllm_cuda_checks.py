"""What the vLLM adapter balances on GPUs, and what it refuses, saying what to change."""

import inspect
import json
import re
import sys
import warnings
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.config.kernel import MEGA_MOE_BACKENDS, MoEBackend
    from vllm.config.parallel import All2AllBackend
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.experts import trtllm_fp8_moe
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_kernels
    from vllm.model_executor.layers.fused_moe.oracle import (
        int8,
        int_wna16,
        mxfp4,
        nvfp4,
        unquantized,
    )

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import build
    from ultraep_serve.engines.vllm import checks, expert_tensors, layer_checks

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.loaded import require_one_number
from ultraep_serve.errors import UnsupportedError

ORACLES = unquantized, fp8_kernels, int8, int_wna16, nvfp4, mxfp4


def refusal(layer: Any) -> str:
    with pytest.raises(UnsupportedError, match="set on_unsupported to off") as error:
        layer_checks.check_device_execution(layer, slots=2)
    return str(error.value)


def refused_settings(config: VllmConfig) -> str:
    """Before anything is loaded."""
    with pytest.raises(UnsupportedError, match="set on_unsupported to off") as error:
        checks.check_settings(config, BalanceConfig())
    return str(error.value)


def test_accepted_names_are_vllms_own() -> None:
    assert set(layer_checks._ALL2ALL_BACKENDS) <= set(get_args(All2AllBackend))
    chosen = "".join(inspect.getsource(oracle.backend_to_kernel_cls) for oracle in ORACLES)
    missing = {
        name for name in layer_checks._EXPERT_KERNELS if not re.search(rf"\b{name}\b", chosen)
    }
    assert not missing


AGRS, ONE_SIDED = "allgather_reducescatter", "flashinfer_nvlink_one_sided"


@pytest.mark.parametrize(
    ("weights", "oracle", "backend", "names"),
    [
        ("nvfp4", nvfp4.map_nvfp4_backend, AGRS, ("marlin", "flashinfer_cutlass")),
        ("mxfp4", lambda name: mxfp4.map_mxfp4_backend(name)[0], AGRS, ("marlin",)),
        ("int4", int_wna16.map_wna16_backend, ONE_SIDED, ("marlin",)),
        ("torch.int8", int8.map_int8_backend, AGRS, ("triton",)),
        ("torch.float8_e4m3fn", fp8_kernels.map_fp8_backend, AGRS, ("triton",)),
        ("torch.float8_e4m3fn", fp8_kernels.map_fp8_backend, ONE_SIDED, ("flashinfer_cutlass",)),
        ("None", unquantized.map_unquantized_backend, AGRS, ("triton",)),
        ("None", unquantized.map_unquantized_backend, ONE_SIDED, ("flashinfer_cutlass",)),
    ],
)
def test_the_flag_that_refusals_name_gives_a_kernel_that_is_balanced(
    weights: str, oracle: Any, backend: str, names: tuple[str, ...]
) -> None:
    config = SimpleNamespace(weight_quant_dtype=weights)
    parallel = vllm_layers.parallel_of(0, 4, backend)
    layer: Any = SimpleNamespace(
        quant_method=SimpleNamespace(moe_quant_config=config),
        moe_config=SimpleNamespace(moe_parallel_config=parallel),
    )
    assert expert_tensors.other_kernel(layer) == f"--moe-backend {' or '.join(names)}"
    assert set(names) <= set(get_args(MoEBackend))
    for name in names:
        backend = oracle(name)
        kernels = sys.modules[type(backend).__module__].backend_to_kernel_cls(backend)  # type: ignore[attr-defined]
        assert kernels[-1].__name__ in layer_checks._EXPERT_KERNELS
        assert kernels[-1]._supports_parallel_config(parallel)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_what_is_verified_is_accepted(balanced: Any, num_hosts: int) -> None:
    layer, config = build(balanced)
    balanced(parallel_state, "_NODE_COUNT", num_hosts)
    for _ in range(2):
        checks.check_settings(config, BalanceConfig())
        layer_checks.check_device_execution(layer, slots=2)
        config.parallel_config.enable_dbo = True  # micro-batches


OTHER_DISPATCH = set(get_args(All2AllBackend)) - {*layer_checks._ALL2ALL_BACKENDS, "passthrough"}


@pytest.mark.parametrize("backend", sorted(OTHER_DISPATCH))
def test_other_dispatch_is_refused_by_name(balanced: Any, backend: str) -> None:
    layer, _ = build(balanced)
    layer.moe_config.moe_parallel_config.all2all_backend = backend
    message = refusal(layer)
    reason = layer_checks._REFUSED_DISPATCH.get(backend, "it has not been verified")
    assert f"no dispatch through {backend}: {reason}; use --all2all-backend" in message


def test_reasons_are_of_backends_that_vllm_has() -> None:
    assert set(layer_checks._REFUSED_DISPATCH) <= OTHER_DISPATCH


@pytest.mark.parametrize(
    ("backend", "kernel", "ranks", "experts", "slots"),
    [
        ("deepep_v2", "TritonExperts", 256, 256, 7),  # 2,048 in all
        ("deepep_v2", "TritonExperts", 2, 508, 2),  # 256 on a rank
        (AGRS, "TrtLlmFp8ExpertsModular", 256, 256, 7),
    ],
)
def test_experts_and_slots_together_fit_what_dispatches_and_computes_them(
    balanced: Any, backend: str, kernel: str, ranks: int, experts: int, slots: int
) -> None:
    layer, _ = build(balanced)
    parallel = vllm_layers.parallel_of(0, ranks, backend)
    held: Any = SimpleNamespace(
        moe_config=SimpleNamespace(moe_parallel_config=parallel),
        local_num_experts=experts // ranks,
        quant_method=SimpleNamespace(
            moe_kernel=SimpleNamespace(fused_experts=type(kernel, (), {})())
        ),
    )
    assert layer_checks._too_many_experts(held, slots) is None
    assert "use fewer --slots or more ranks" in str(layer_checks._too_many_experts(held, slots + 1))
    assert layer_checks._too_many_experts(layer, 64) is None


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("parallel_config", "enable_elastic_ep", True, "drop --enable-elastic-ep"),
        ("parallel_config", "enable_fault_tolerance", True, "drop --enable-fault-tolerance"),
        ("parallel_config", "enable_eplb", True, "--enable-eplb moves the same weights; drop it"),
        ("parallel_config", "enable_expert_parallel", False, "add --enable-expert-parallel"),
        ("parallel_config", "data_parallel_size", 1, "there is nothing to balance on one rank"),
        ("parallel_config", "prefill_context_parallel_size", 2, "parallel-size 1"),
        ("offload_config.uva", "cpu_offload_gb", 1, "drop --cpu-offload-gb"),
        ("offload_config.prefetch", "offload_group_size", 8, "drop --offload-group-size"),
        ("", "lora_config", object(), "drop --enable-lora"),
        ("", "model_config", SimpleNamespace(enable_sleep_mode=True), "drop --enable-sleep-mode"),
    ],
)
def test_settings_that_do_not_go_with_slots(
    balanced: Any, section: str, name: str, value: object, remedy: str
) -> None:
    _, config = build(balanced)
    object.__setattr__(attrgetter(section)(config) if section else config, name, value)
    assert remedy in refused_settings(config)


def test_sums_that_must_not_depend_on_the_batch_are_refused(
    balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config = build(balanced)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "unset it" in refused_settings(config)


def test_batches_that_all_replay_cuda_graphs_are_refused(balanced: Any) -> None:
    """Of decode alone they leave prefill to be planned, and so do graphs of smaller batches."""
    _, config = build(balanced)
    largest, compilation = config.scheduler_config.max_num_batched_tokens, config.compilation_config
    compilation.max_cudagraph_capture_size = largest
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert "a smaller --max-cudagraph-capture-size" in refused_settings(config)
    for mode, captured in (("FULL_DECODE_ONLY", largest), ("FULL_AND_PIECEWISE", largest - 1)):
        compilation.cudagraph_mode = CUDAGraphMode[mode]
        compilation.max_cudagraph_capture_size = captured
        checks.check_settings(config, BalanceConfig())


def test_users_are_told_which_prefill_cuda_graphs_replay(balanced: Any) -> None:
    _, config = build(balanced)
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.max_cudagraph_capture_size = 512
    told = checks.note_on_graphs(config, BalanceConfig())
    assert told.startswith("prefill batches of up to 512 tokens on a rank replay CUDA graphs")
    (remedy,) = re.findall(r"--compilation-config '(.*)'", told)
    compilation.cudagraph_mode = CUDAGraphMode[json.loads(remedy)["cudagraph_mode"]]
    assert not checks.note_on_graphs(config, BalanceConfig())
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    replicas = config.parallel_config.data_parallel_size
    small = BalanceConfig(min_batch_tokens=512 * replicas + 1)
    assert not checks.note_on_graphs(config, small)  # they are all left alone anyway


def test_layers_that_share_no_slots_are_refused() -> None:
    require_one_number([8, 8])
    with pytest.raises(UnsupportedError, match=r"experts \[8, 16\] share no slots"):
        require_one_number([8, 16])


def test_tensor_and_data_parallelism_need_tokens_of_their_own(balanced: Any) -> None:
    """Two engines of two ranks: with sequence parallelism each of the four has its own tokens."""
    own = vllm_layers.parallel_of(0, 4, "allgather_reducescatter", tensor_size=2)
    layer, _ = build(balanced, parallel=own)
    layer_checks.check_device_execution(layer, slots=2)
    own.sp_size = 1
    assert "count them more than once" in refusal(layer)


def test_kernels_that_route_themselves_are_refused(balanced: Any) -> None:
    layer, _ = build(balanced)
    monolithic = trtllm_fp8_moe.TrtLlmFp8ExpertsMonolithic
    layer.quant_method.moe_kernel = SimpleNamespace(
        is_monolithic=True, fused_experts=monolithic.__new__(monolithic)
    )
    message = refusal(layer)
    assert "TrtLlmFp8ExpertsMonolithic routes inside its kernel" in message
    assert "use --moe-backend triton" in message
    layer.quant_method.moe_kernel = SimpleNamespace(is_monolithic=False, fused_experts=object())
    assert "expert kernel object has not been verified" in refusal(layer)


def test_a_megakernel_is_refused_where_it_cannot_be_given_slots(balanced: Any) -> None:
    """Also where only a model's own module shows that, which is seen when it is loaded."""
    _, config = build(balanced)
    model = SimpleNamespace(
        model="dsv4", enable_sleep_mode=False, max_model_len=64, architectures=[]
    )
    balanced(config, "model_config", model)
    without_more = "flashinfer_moe_ep_mega_deep_gemm"
    for backend in MEGA_MOE_BACKENDS - {"deep_gemm_mega_moe", without_more}:
        config.kernel_config.moe_backend = backend
        checks.check_settings(config, BalanceConfig())
    config.kernel_config.moe_backend = without_more
    assert "no more experts than the model has" in refused_settings(config)
    config.kernel_config.moe_backend = "deep_gemm_mega_moe"
    message = str(checks.without_experts(config))
    assert "deep_gemm_mega_moe computes its experts in a module of the model's own" in message
    assert "use --moe-backend marlin, or set on_unsupported" in message
    balanced(checks, "MEGA_MOE", None)
    assert "install vLLM 0.33, or use --moe-backend marlin" in refused_settings(config)


def test_speeds_are_not_measured_by_a_kernel_that_waits_for_others(balanced: Any) -> None:
    _, config = build(balanced)
    checks.check_settings(config, BalanceConfig(speeds="auto"))
    config.parallel_config.all2all_backend = "passthrough"
    checks.check_settings(config, BalanceConfig(speeds="1.0,0.5,1.0"))
    with pytest.raises(UnsupportedError, match="use --speeds equal, or numbers"):
        checks.check_settings(config, BalanceConfig(speeds="auto"))


def test_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm")
    monkeypatch.setattr(checks, "current_platform", platform)
    with pytest.raises(UnsupportedError, match="rocm is not there yet"):
        checks.check_engine()
