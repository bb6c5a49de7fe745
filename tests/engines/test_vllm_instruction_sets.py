"""What the adapter takes and refuses on CPUs with other instructions than this one has."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.quantization import get_quantization_config

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import NAMES, configure
    from ultraep_serve.engines.vllm import checks, load

from tests.support.instruction_sets import INSTRUCTION_SETS, pretend
from tests.support.quantised import SCHEMES
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy

FORMATS = ("fp8", "int8", "int4", "mxfp4")  # of which vLLM has kernels for CPUs
KERNELS = ("CPUExpertsFp8", "CPUExpertsInt8", "CPUExpertsInt4", "CPUExpertsMxfp4")
PLAIN = SimpleNamespace()
QUANTISED = SimpleNamespace(quantization_config={"quant_method": "fp8"})
MODEL = SimpleNamespace(model="some/model", architectures=["Some"], hf_config=QUANTISED)


def config_of_checkpoint(scheme: str, left_alone: list[str]) -> Any:
    """vLLM's configuration of a checkpoint with experts in ``scheme``."""
    config = vllm_layers.engine_config(0, 2, "allgather_reducescatter", NAMES)
    settings = SCHEMES[scheme].config(left_alone)
    found = get_quantization_config(settings["quant_method"]).from_config(settings)
    object.__setattr__(config, "quant_config", found)
    object.__setattr__(config, "model_config", MODEL)
    return config


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("scheme", FORMATS)
def test_quantised_experts_are_refused_by_name_where_vllm_has_no_kernel(
    monkeypatch: pytest.MonkeyPatch, scheme: str, name: str
) -> None:
    pretend(monkeypatch.setattr, name)
    config = config_of_checkpoint(scheme, ["lm_head"])
    runs = {getattr(cpu_moe, kernel)._supports_current_device() for kernel in KERNELS}
    assert runs == {checks.has_amx()} == {INSTRUCTION_SETS[name].amx}
    if checks.has_amx():
        checks.check_checkpoint(config)
        return
    form = config.quant_config.get_name()
    refused = f"some/model has {form} experts.* AMX.* AVX.*; "
    with pytest.raises(UnsupportedError, match=f"{refused}use an unquantised checkpoint"):
        checks.check_checkpoint(config)
    monkeypatch.setattr(MODEL, "hf_config", PLAIN)  # vLLM quantises it while loading
    with pytest.raises(UnsupportedError, match=f"{refused}drop --quantization"):
        checks.check_checkpoint(config)


def test_checkpoints_whose_experts_are_not_quantised_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch.setattr, "AVX2")
    checks.check_checkpoint(config_of_checkpoint("int8", ["re:.*mlp.experts.*"]))
    config = vllm_layers.engine_config(0, 2, "allgather_reducescatter", NAMES)
    assert config.quant_config is None
    checks.check_checkpoint(config)
    object.__setattr__(config, "lora_config", object())
    with pytest.raises(UnsupportedError, match=r"; drop --enable-lora$"):
        checks.check_checkpoint(config)


@pytest.mark.parametrize("policy", [Policy.QUOTA, Policy.OFF])
def test_the_refusal_comes_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """With policy off too: expert parallelism on CPU is ours."""
    pretend(monkeypatch.setattr, "AVX2")
    configure(monkeypatch.setenv, policy=policy)
    seen: list[str] = []
    wrapper: Any = SimpleNamespace(
        vllm_config=config_of_checkpoint("fp8", []),
        worker=SimpleNamespace(load_model=lambda: seen.append("loaded")),
    )
    with pytest.raises(UnsupportedError, match="use an unquantised checkpoint"):
        load._load_model(wrapper)
    assert seen == []
    monkeypatch.delenv("ULTRAEP_CONFIG")
    load._load_model(wrapper)  # nobody asked us
    assert seen == ["loaded"]
