"""Quantised experts on GPUs: SGLang's own methods on CPU tensors; their kernels stand in.

What is asked of each method is that nothing of an expert is left behind when its tensors are
copied: experts loaded in another order come out in that order, and kernels are given the slots.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    from tests.support import sglang_fakes as fakes  # has what SGLang looks for

    # isort: split
    from sglang.srt.layers.moe import utils as moe_utils
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.awq.awq import AWQMarlinConfig
    from sglang.srt.layers.quantization.blockwise_int8 import BlockInt8Config
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.gptq.gptq import GPTQMarlinConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptFp8Config
    from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config

    from ultraep_serve.engines.sglang import checks, model, quantised

from tests.support.experts import make_batch
from tests.support.hosts import engine_group
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.balance.agreement import require_agreement
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError

SHAPE = fakes.SHAPE
AUTO, MARLIN = {"moe_runner_backend": "auto"}, {"moe_runner_backend": "marlin"}
CUTLASS = {"moe_runner_backend": "flashinfer_cutlass"}


@dataclass(frozen=True)
class Case:
    """A checkpoint's quantisation."""

    config: Callable[[], Any]
    changes: dict[str, Any] = field(default_factory=dict)  # of SGLang's settings
    num_moving: int = 4  # tensors that make up an expert


def compressed_tensors(form: str, bits: int, kind: str, strategy: str, **weights: Any) -> Any:
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "strategy": strategy, **weights},
        "input_activations": None if bits == 4 else {**activations, "symmetric": True},
    }
    return CompressedTensorsConfig.from_config(
        {"format": form, "ignore": [], "config_groups": {"group_0": group}}
    )


def gptq(act_order: bool) -> Any:
    full = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": act_order}
    return GPTQMarlinConfig(4, 32, act_order, True, False, {}, full)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
CASES: dict[str, Case] = {
    "FP8, blocks": Case(lambda: Fp8Config(True, "dynamic", None, [128, 128])),
    "FP8, static": Case(lambda: Fp8Config(True, "static")),
    "FP8, channels": Case(lambda: W8A8Fp8Config(True)),
    "FP8, ModelOpt": Case(lambda: ModelOptFp8Config(True)),
    "FP8, compressed-tensors": Case(
        partial(compressed_tensors, "float-quantized", 8, "float", "channel", symmetric=True)
    ),
    "INT8, channels": Case(lambda: W8A8Int8Config({})),
    "INT8, blocks": Case(lambda: BlockInt8Config(True, "dynamic", None, [128, 128])),
    "INT4, compressed-tensors": Case(
        partial(
            compressed_tensors,
            *("pack-quantized", 4, "int", "group"),
            symmetric=True,
            group_size=32,
        ),
        AUTO,
        num_moving=10,
    ),
    "INT4, AWQ": Case(lambda: AWQMarlinConfig(4, 32, True, False, None, AWQ), AUTO, num_moving=8),
    "INT4, GPTQ": Case(partial(gptq, False), AUTO, num_moving=10),
    "INT4, GPTQ in order of activation": Case(partial(gptq, True), AUTO, num_moving=10),
    "INT4, Triton": Case(lambda: MoeWNA16Config("gptq", 4, 32, False, False, None, GPTQ)),
    "MXFP4, Marlin": Case(lambda: Mxfp4Config(None, True), MARLIN, num_moving=6),
    "NVFP4, CUTLASS": Case(
        lambda: ModelOptFp4Config(True, group_size=16, exclude_modules=[]), CUTLASS, num_moving=9
    ),
    "NVFP4, Marlin": Case(
        lambda: ModelOptFp4Config(True, group_size=16, exclude_modules=[]), MARLIN, num_moving=8
    ),
}


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_gpu(monkeypatch.setattr)
    fakes.pretend_repacking(partial(monkeypatch.setattr, raising=False))


def loaded(case: Case, order: list[int], rank: int = 0) -> Any:
    """A layer whose experts were loaded in such an order, then prepared as SGLang does it."""
    fakes.publish(rank, **case.changes)
    layer = fakes.build_layer(0, case.config())
    for name, parameter in layer.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        values = torch.randint(1, 100, parameter.shape, generator=generator)
        if parameter.dtype.is_floating_point:
            values = values / 50
        if parameter.shape[:1] == (SHAPE.num_masters,):
            values = values[order]
        parameter.data.copy_(values)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def moving(layer: Any) -> dict[str, torch.Tensor]:
    ids = {id(parameter) for parameter in model.movable_parameters(layer)}
    return {name: own.data for name, own in layer.named_parameters() if id(own) in ids}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(tensor.shape[0], -1).view(torch.uint8)


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_an_experts_own_goes_with_it(name: str) -> None:
    case, order = CASES[name], list(range(SHAPE.num_masters))
    layer, reversed_layer = loaded(case, order), loaded(case, order[::-1])
    checks.check_layer(layer)
    checks.check_device_execution(layer)
    tensors, others = moving(layer), moving(reversed_layer)
    assert tensors.keys() == others.keys()
    assert len(tensors) == case.num_moving
    for key, tensor in tensors.items():
        assert tensor.is_contiguous(), key
        assert torch.equal(as_bytes(tensor).flip(0), as_bytes(others[key])), key


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_given_the_slots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = loaded(CASES[name], list(range(SHAPE.num_masters)))
    parameters, taken = model.movable_parameters(layer), []
    fakes.note_kernel_calls(layer, partial(monkeypatch.setattr, raising=False), taken)
    fakes.layers_of().give_slots([ExpertWeights(layer, parameters)], SHAPE)
    for parameter in parameters:
        parameter.data = parameter.data.new_zeros(SHAPE.num_local, *parameter.shape[1:])
    batch = make_batch(0, 7, fakes.HIDDEN)  # no number of experts
    layer(batch.x, fakes.topk_of(batch))
    rows = [tensor.shape[0] for tensor in tensors_in(taken) if tensor.dim() > 1]
    assert rows.count(SHAPE.num_local) >= 2  # two weights at least, and nothing without slots
    assert SHAPE.num_masters not in rows


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All that a kernel is given, however it is wrapped."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


def test_every_accepted_method_is_tested() -> None:
    owners = {
        type(quantised._owner(loaded(case, [0, 1, 2, 3]))).__name__ for case in CASES.values()
    }
    assert owners | {"UnquantizedFusedMoEMethod"} == set(quantised._RUNNERS)
    runners = {runner for accepted in quantised._RUNNERS.values() for runner in accepted}
    assert runners | set(quantised._ROUTING) <= {runner.value for runner in MoeRunnerBackend}


@pytest.mark.parametrize(
    ("name", "runner", "says"),
    [
        ("NVFP4, CUTLASS", "flashinfer_trtllm", "routes inside its kernel with ModelOptNvFp4"),
        ("MXFP4, Marlin", "flashinfer_mxfp4", "routes inside its kernel with Mxfp4MoEMethod"),
        ("MXFP4, Marlin", "triton_kernel", "has not been verified with Mxfp4MoEMethod"),
    ],
)
def test_kernels_that_cannot_take_slots_are_refused(name: str, runner: str, says: str) -> None:
    layer = loaded(CASES[name], [0, 1, 2, 3])
    layer.runner_backend = MoeRunnerBackend(runner)
    with pytest.raises(UnsupportedError, match=says) as error:
        checks.check_device_execution(layer)
    remedy = "flashinfer_cutlass or marlin" if "NVFP4" in name else "marlin"
    assert f"use --moe-runner-backend {remedy}, or" in str(error.value)


def test_tokens_gathered_by_the_dispatch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only NVFP4 with attention data parallelism: every rank routes its own tokens then."""
    monkeypatch.setattr(moe_utils, "is_dp_attention_enabled", lambda: True)
    own = {**CUTLASS, "attn_dp_size": 3, "quantization": "modelopt_fp4"}
    case = replace(CASES["NVFP4, CUTLASS"], changes=own)
    layer = loaded(case, [0, 1, 2, 3])
    with pytest.raises(UnsupportedError, match="add --disable-flashinfer-cutlass-moe-fp4-allg"):
        checks.check_device_execution(layer)
    flag = {"disable_flashinfer_cutlass_moe_fp4_allgather": True}
    checks.check_device_execution(loaded(replace(case, changes={**own, **flag}), [0, 1, 2, 3]))


# Scales of all experts, between ranks


def check_on_rank(rank: int, path: str) -> list[str]:
    """What ranks say when they load the same static scales, others, and a method's own."""
    engine_group(path, rank, SHAPE.num_ranks)
    fakes.pretend_gpu(setattr)
    fakes.pretend_repacking(setattr)
    config = BalanceConfig()
    said = []
    for name, scale in (
        *(("FP8, static", rank), ("FP8, static", 0)),
        *(("FP8, ModelOpt", rank), ("NVFP4, CUTLASS", 0)),
    ):
        case = CASES[name]
        fakes.publish(rank, **case.changes)
        layer = fakes.build_layer(0, case.config())
        for parameter in layer.parameters():
            parameter.data.fill_(1)
        layer.w2_input_scale.data[0] = 1 + scale
        layer.quant_method.process_weights_after_loading(layer)
        try:
            require_agreement([quantised.shared_values(layer)], dist.group.WORLD, config)
            said.append("")
        except UnsupportedError as error:
            said.append(str(error))
    return said


def test_scales_reduced_over_a_ranks_own_experts_are_found() -> None:
    """A copy would be computed with its host's; the same value everywhere is no problem."""
    with fresh_run_path() as path:
        found = run_ranks(check_on_rank, SHAPE.num_ranks, str(path), timeout_seconds=400)
    assert found[0] == found[1] == found[2]
    differ, same, modelopt, nvfp4 = found[0]
    assert same == nvfp4 == ""
    for said in (differ, modelopt):
        assert "ranks differ in what holds for all their experts" in said
        assert "w2_input_scale" in said
        assert "dynamic activation scales" in said
