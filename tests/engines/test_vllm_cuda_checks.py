"""What the vLLM adapter balances on GPUs, and what it refuses, saying what to change."""
# ruff: noqa: TID251 - vLLM's own objects are what is tested

import warnings
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import VllmConfig
    from vllm.config.parallel import All2AllBackend
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_kernels
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import build, fp8_config
    from ultraep_serve.adapters.vllm import checks

from ultraep_serve.adapters.setup import require_one_number
from ultraep_serve.errors import UnsupportedError


def refusal(layer: Any, config: VllmConfig) -> str:
    with pytest.raises(UnsupportedError) as error:
        checks.check_device_execution(layer, config)
    assert "set on_unsupported to off" in str(error.value)
    return str(error.value)


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


def test_several_hosts_are_accepted(balanced: Any) -> None:
    layer, config = build(balanced)
    balanced(parallel_state, "_NODE_COUNT", 2)
    checks.check_device_execution(layer, config)


def test_layers_that_share_no_slots_are_refused() -> None:
    require_one_number([8, 8])
    with pytest.raises(UnsupportedError, match=r"experts \[8, 16\] share no slots"):
        require_one_number([8, 16])


def test_tensor_and_data_parallelism_need_tokens_of_their_own(balanced: Any) -> None:
    """Two engines of two ranks: with sequence parallelism each of the four has its own tokens."""
    own = vllm_layers.parallel_of(0, 4, "allgather_reducescatter", tensor_size=2)
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


def test_static_activation_scales_are_refused(balanced: Any) -> None:
    layer, config = build(balanced, quant_config=fp8_config("static", None))
    assert "dynamic activation scales" in refusal(layer, config)


def test_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False, device_name="rocm")
    monkeypatch.setattr(checks, "current_platform", platform)
    with pytest.raises(UnsupportedError, match="rocm is not there yet"):
        checks.check_engine()
