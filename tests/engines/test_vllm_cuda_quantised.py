"""Quantised experts on GPUs: what a copy takes along, in vLLM's own methods' order of tensors."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm import _custom_ops as ops
    from vllm.config import set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_kernels
    from vllm.model_executor.layers.fused_moe.oracle import int8 as int8_kernels
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16 as int4_kernels
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_kernels
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as nvfp4_kernels
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, modelopt, mxfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as packed_nvfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_int8 as packed_int8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as packed_int4,
    )
    from vllm.model_executor.layers.quantization.online import fp8 as online_fp8
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import (
        NAMES,
        NUM_LOCAL,
        NUM_MASTERS,
        NUM_RANKS,
        NUM_SLOTS,
        SHAPE,
        TritonExperts,
        build,
        fp8_config,
        one_scale_per_expert,
    )
    from ultraep_serve.engines.vllm import expert_tensors, layer_checks, load, model
    from ultraep_serve.engines.vllm.stage import VllmFlow

from tests.support.experts import NUM_EXPERTS
from tests.support.quantised import SCHEMES, compressed_tensors
from ultraep_serve.balance.agreement import SharedValues
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import TokenView

_INNER = 128  # a multiple of all formats' groups


@dataclass(frozen=True)
class Format:
    """How a checkpoint is quantised, and the kernel that computes its experts."""

    config: Callable[[], Any]  # vLLM's own, of a checkpoint
    method: ModuleType  # of the quantisation method
    select: str  # what it calls to choose a kernel
    kernels: ModuleType
    backend: Any  # one of the kernels' names there
    has_bias: bool = False


def build_format(set_attribute: Any, name: str) -> tuple[Any, Any]:
    """A layer of rank 0 in a format, its weights in the kernel's order, and its configuration.

    Weights and scales are random and differ by expert, but for the scales of activations.
    """
    chosen = FORMATS[name]
    _stand_in(set_attribute)
    kernel = chosen.kernels.backend_to_kernel_cls(chosen.backend)[-1]  # monolithic ones are first
    set_attribute(chosen.method, chosen.select, lambda *_, **__: (chosen.backend, kernel))
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", ["layer"])
    parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
    layer = vllm_layers.build_layer(
        config,
        parallel,
        "layer",
        chosen.config(),
        intermediate_size=_INNER,
        has_bias=chosen.has_bias,
    )
    _fill(layer)
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
    return layer, config


def _fill(layer: torch.nn.Module) -> None:
    """Random codes without the NaN of FP8, and scales of one value per expert."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        data = parameter.data
        if "input" in name:
            data.fill_(0.5)
        elif data.dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = torch.rand(data.shape[0], *[1] * (data.dim() - 1), generator=generator) + 0.5
            data.copy_(values.expand(data.shape))
        else:
            codes = data.view(torch.uint8)
            codes.copy_(torch.randint(0, 96, codes.shape, generator=generator))


def _stand_in(set_attribute: Any) -> None:
    def repack(
        b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: Any
    ) -> torch.Tensor:
        shape = (*b_q_weight.shape[:-2], size_k // 16, size_n * (num_bits // 2))
        return b_q_weight.reshape(shape)

    for name in ("gptq_marlin_repack", "gptq_marlin_moe_repack", "awq_marlin_moe_repack"):
        set_attribute(
            ops,
            name,
            lambda codes=None, *sizes, **named: repack(
                named.pop("b_q_weight", codes), *sizes, **named
            ),
        )
    set_attribute(fp8, "process_fp8_weight_tensor_strategy_moe", one_scale_per_expert)
    set_attribute(mxfp4_kernels, "_validate_mxfp4_experts_config", lambda *_: None)
    set_attribute(torch.Tensor, "cuda", lambda tensor: tensor)
    set_attribute(torch.accelerator, "current_device_index", lambda: torch.device("cpu"))
    for name, functions in _flashinfer().items():
        module: Any = ModuleType(name)
        vars(module).update(functions)
        set_attribute(sys, "modules", {**sys.modules, name: module})


def _flashinfer() -> dict[str, dict[str, Any]]:
    """FlashInfer's orders of rows and scales within an expert: as they came."""

    def rows_of(_: Any, matrix: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
        return torch.arange(matrix.shape[0])

    def as_they_came(scales: torch.Tensor) -> torch.Tensor:
        return scales.reshape(-1)

    interleaved = (
        "interleave_moe_weights_for_sm90_mixed_gemm",
        "interleave_moe_scales_for_sm90_mixed_gemm",
    )
    orders = ("_maybe_get_cached_w3_w1_permute_indices", "get_w2_permute_indices_with_cache")
    return {
        "flashinfer": {"nvfp4_block_scale_interleave": as_they_came},
        "flashinfer.fused_moe": dict.fromkeys(interleaved, lambda tensor, *_: tensor),
        "flashinfer.fused_moe.core": dict.fromkeys(orders, rows_of),
        "flashinfer.fp4_quantization": {"nvfp4_block_scale_interleave": as_they_came},
    }


def _packed(scheme: str) -> CompressedTensorsConfig:
    """compressed-tensors' configuration of a scheme that ``tests.support.quantised`` writes."""
    return CompressedTensorsConfig.from_config(SCHEMES[scheme].config([]))


def _nvfp4_packed() -> CompressedTensorsConfig:
    settings = compressed_tensors("NVFP4", "nvfp4-pack-quantized", [])
    return CompressedTensorsConfig.from_config(settings)


def _awq() -> Any:
    return auto_awq.AutoAWQConfig(4, 128, True, False)


def _gptq() -> Any:
    return auto_gptq.AutoGPTQConfig(4, 128, False, True, False, {}, {})


def _nvfp4() -> Any:
    return modelopt.ModelOptNvFp4Config("NVFP4", is_checkpoint_nvfp4_serialized=True)


_FP8 = (fp8, "select_fp8_moe_backend", fp8_kernels)
_Fp8 = fp8_kernels.Fp8MoeBackend
_INT4 = (packed_int4, "select_wna16_moe_backend", int4_kernels)
_NVFP4 = (modelopt, "select_nvfp4_moe_backend", nvfp4_kernels)
_NVFP4_PACKED = (packed_nvfp4, "select_nvfp4_moe_backend", nvfp4_kernels)
_MXFP4 = (mxfp4, "select_mxfp4_moe_backend", mxfp4_kernels)
_Int4, _NvFp4 = int4_kernels.WNA16MoEBackend, nvfp4_kernels.NvFp4MoeBackend
_MxFp4 = mxfp4_kernels.Mxfp4MoeBackend

FORMATS = {
    "fp8-cutlass": Format(lambda: fp8_config("dynamic", None), *_FP8, _Fp8.VLLM_CUTLASS),
    "fp8-blocks": Format(lambda: fp8_config("dynamic", [128, 128]), *_FP8, _Fp8.TRITON),
    "fp8-marlin": Format(lambda: fp8_config("dynamic", None), *_FP8, _Fp8.MARLIN),
    "int8-triton": Format(
        lambda: _packed("int8"),
        packed_int8,
        "select_int8_moe_backend",
        int8_kernels,
        int8_kernels.Int8MoeBackend.TRITON,
        has_bias=True,
    ),
    "int4-marlin": Format(lambda: _packed("int4"), *_INT4, _Int4.MARLIN, has_bias=True),
    "int4-triton": Format(lambda: _packed("int4"), *_INT4, _Int4.TRITON),
    "awq-marlin": Format(_awq, auto_awq, "select_wna16_moe_backend", int4_kernels, _Int4.MARLIN),
    "gptq-marlin": Format(_gptq, auto_gptq, "select_wna16_moe_backend", int4_kernels, _Int4.MARLIN),
    "nvfp4-marlin": Format(_nvfp4, *_NVFP4, _NvFp4.MARLIN),
    "nvfp4-cutlass": Format(_nvfp4, *_NVFP4, _NvFp4.VLLM_CUTLASS),
    "nvfp4-flashinfer": Format(_nvfp4, *_NVFP4, _NvFp4.FLASHINFER_CUTLASS),
    "nvfp4-trtllm": Format(_nvfp4, *_NVFP4, _NvFp4.FLASHINFER_TRTLLM),
    "nvfp4-packed-marlin": Format(_nvfp4_packed, *_NVFP4_PACKED, _NvFp4.MARLIN),
    "nvfp4-packed-flashinfer": Format(_nvfp4_packed, *_NVFP4_PACKED, _NvFp4.FLASHINFER_CUTLASS),
    "mxfp4-marlin": Format(mxfp4.GptOssMxfp4Config, *_MXFP4, _MxFp4.MARLIN, has_bias=True),
    "mxfp4-flashinfer": Format(
        mxfp4.GptOssMxfp4Config, *_MXFP4, _MxFp4.FLASHINFER_CUTLASS_MXFP4_BF16, has_bias=True
    ),
    "mxfp4-trtllm": Format(
        mxfp4.GptOssMxfp4Config,
        *_MXFP4,
        _MxFp4.FLASHINFER_TRTLLM_MXFP4_MXFP8,
        has_bias=True,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_takes_along_all_that_the_kernel_reads(balanced: Any, name: str) -> None:
    """Rows of slots are copied from masters in the layer's parameters, then seen by the kernel."""
    layer, config = build_format(balanced, name)
    layer_checks.check_device_execution(layer, slots=2)
    parameters = expert_tensors.expert_parameters(layer)
    execution = model._Layers(config, VllmFlow(TokenView.OWN), None, [layer])  # type: ignore[arg-type]
    weights, plain = [ExpertWeights(layer, parameters)], layer.quant_method.moe_kernel
    with set_current_vllm_config(config):
        execution.give_slots(weights, SHAPE)
        for parameter in parameters:
            parameter.data = torch.cat([parameter.data, parameter.data[1 : 1 + NUM_SLOTS]])
        seen = dict(read_by_kernel(layer))
        for slot in range(NUM_SLOTS):
            for tensor, value in seen.items():
                rows = value.data.contiguous().view(-1).view(torch.uint8).view(NUM_LOCAL, -1)
                assert torch.equal(rows[NUM_MASTERS + slot], rows[1 + slot]), tensor
        differ = [name for name, value in seen.items() if not expert_tensors._all_rows_equal(value)]
        assert {"w13_weight", "w2_weight", "w1 scale", "w2 scale"} <= set(differ)
        for parameter in parameters:
            parameter.data = parameter.data[:NUM_MASTERS]
        execution.take_slots(weights, SHAPE)
    assert layer.quant_method.moe_kernel is plain
    assert {value.shape[0] for _, value in read_by_kernel(layer)} == {NUM_MASTERS}
    assert layer.global_num_experts == layer.expert_map.numel() == NUM_EXPERTS


def read_by_kernel(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What the kernel has once per local expert, by name."""
    experts = layer.quant_method.moe_kernel.fused_experts
    values = {"w13_weight": layer.w13_weight, "w2_weight": layer.w2_weight}
    for name, value in [*values.items(), *expert_tensors._read_by(experts)]:
        if value.dim() and value.shape[0] in (NUM_LOCAL, NUM_MASTERS):
            yield name, value


def shared_values(layer: Any) -> SharedValues:
    return expert_tensors.shared_values(layer, expert_tensors.expert_parameters(layer))


def refused(layer: Any) -> str:
    with pytest.raises(UnsupportedError, match="set on_unsupported to off") as found:
        shared_values(layer)
    return str(found.value)


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (
            lambda patch: build(patch, quant_config=fp8_config("static", None))[0],
            "w13_input_scale",
            "a checkpoint with dynamic activation scales",
        ),
        (
            lambda patch: build_format(patch, "nvfp4-flashinfer")[0],
            "w13_input_scale",
            "--moe-backend marlin, which needs no activation scales",
        ),
        (
            lambda patch: build_format(patch, "nvfp4-packed-flashinfer")[0],
            "a1 alpha_or_gscale",
            "--moe-backend marlin, which needs no activation scales",
        ),
    ],
    ids=["fp8", "nvfp4", "nvfp4-packed"],
)
def test_scales_that_a_rank_takes_from_its_own_experts_must_be_the_same_on_all(
    balanced: Any, make: Callable[[Any], Any], name: str, remedy: str
) -> None:
    layer = make(balanced)
    own, same = shared_values(layer), shared_values(make(balanced))
    assert own == same
    assert name in own.names
    assert own.remedy == remedy
    parameters = expert_tensors.expert_parameters(layer)
    value = dict(expert_tensors._shared_values(layer, parameters))[name]
    value.data.mul_(2)
    other = shared_values(layer)
    assert other.digest != own.digest


def test_scales_of_single_experts_that_do_not_move_are_refused(balanced: Any) -> None:
    """vLLM's CUTLASS kernel has one activation scale per expert, computed from a parameter."""
    layer, _ = build_format(balanced, "nvfp4-cutlass")
    config = layer.quant_method.moe_quant_config
    config._a1.alpha_or_gscale = torch.arange(1.0, 1.0 + NUM_MASTERS)
    message = refused(layer)
    assert "a1 alpha_or_gscale of CutlassExpertsFp4 cannot be moved" in message
    assert "use --moe-backend marlin or flashinfer_cutlass" in message


def test_views_of_expert_tensors_are_refused(balanced: Any) -> None:
    """vLLM's CuteDSL kernel has such a view of its scales: it would show the old memory."""
    layer, _ = build_format(balanced, "nvfp4-flashinfer")
    experts = layer.quant_method.moe_kernel.fused_experts
    experts.quant_config._w1.scale = layer.w13_weight_scale.data.permute(1, 2, 0)
    assert "w1 scale of FlashInferExperts cannot be moved" in refused(layer)


def test_scales_that_are_no_tensors_are_refused(balanced: Any) -> None:
    layer, _ = build(balanced)
    layer.quant_method.moe_kernel.fused_experts.quant_config._w1.scale = object()
    assert "where they cannot be copied from" in refused(layer)
    layer.quant_method.moe_kernel.fused_experts.quant_config._w1.scale = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: transpose(layer.w2_weight), "cannot be split by expert"),
        (lambda layer: add(layer, torch.ones(1)), "cannot be split by expert"),
        (lambda layer: add(layer, torch.ones(1, NUM_MASTERS)), r"\(1, 4\) does not hold 4 experts"),
        (lambda layer: wrap(layer), "keeps w13_weight outside of the layer's parameters"),
    ],
    ids=["transposed", "one value", "other dimension", "no parameter"],
)
def test_layouts_that_do_not_hold_one_expert_after_another_are_refused(
    balanced: Any, change: Callable[[Any], None], message: str
) -> None:
    layer, _ = build(balanced)
    change(layer)
    with pytest.raises(UnsupportedError, match=f"{message}.*--moe-backend triton"):
        expert_tensors.expert_parameters(layer)


def transpose(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data.transpose(1, 2)


def add(layer: Any, tensor: torch.Tensor) -> None:
    layer.register_parameter("more", torch.nn.Parameter(tensor))


def wrap(layer: Any) -> None:
    """As vLLM does it with ``triton_kernels``' tensors of MXFP4 weights."""
    weight = layer.w13_weight.data
    del layer.w13_weight
    layer.w13_weight = weight


class Quantising(BaseModelLoader):
    """A loader of a model that is one MoE layer, quantised by vLLM while it is loaded."""

    download_model = None  # type: ignore[assignment]

    def create_model(self, vllm_config: Any, *_: Any, **__: Any) -> torch.nn.Module:
        args = QuantizationConfigArgs(moe="fp8_per_block")  # type: ignore[arg-type]
        parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
        online = OnlineQuantizationConfig(args)
        layer = vllm_layers.build_layer(vllm_config, parallel, NAMES[0], online)
        self.final = list[int]()  # addresses of weights, each time they were said to be final
        layer.update_param_tp_status = lambda: self.final.append(layer.w13_weight.data_ptr())
        return torch.nn.ModuleList([layer])

    def load_weights(self, loaded: Any, *_: Any) -> None:
        (layer,) = loaded
        assert layer.w13_weight.is_meta
        for expert in range(NUM_MASTERS):
            matrix = torch.full((vllm_layers.INNER, vllm_layers.HIDDEN), 1.0 + expert)
            for name, shard in (("w13_weight", "w1"), ("w13_weight", "w3"), ("w2_weight", "w2")):
                given = matrix.T if shard == "w2" else matrix
                weight = getattr(layer, name)
                weight.weight_loader(weight, given.bfloat16(), name, shard, expert)


@pytest.mark.parametrize("kernel", ["TritonExperts", "SomeExperts"])
def test_experts_quantised_while_loading_are_taken_over_when_that_has_ended(
    balanced: Any, kernel: str
) -> None:
    """vLLM says twice that the weights of such a layer are final; that is no new loading."""
    compiled = online_fp8.per_block_cast_to_fp8
    balanced(online_fp8, "per_block_cast_to_fp8", compiled._torchdynamo_orig_callable)
    chosen = type(kernel, (TritonExperts,), {})
    select = lambda config, **_: (fp8_kernels.Fp8MoeBackend.TRITON, chosen)  # noqa: E731
    balanced(online_fp8, "select_fp8_moe_backend", select)
    balanced(torch.accelerator, "empty_cache", lambda: None)
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    loader, seen = Quantising(config.load_config), list[Any]()
    described: Any = SimpleNamespace(
        dtype=torch.bfloat16, quantization="", word_embeddings_untied_by_checkpoint=False
    )
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = config
    wrapper.worker = SimpleNamespace(
        load_model=lambda: seen.extend(loader.load_model(config, described))
    )
    balanced(model, "take_over", lambda *_: seen.append(list(loader.final)))
    load._load_model(wrapper)
    layer, final = seen
    assert len(final) == 2
    if kernel == "SomeExperts":
        with pytest.raises(UnsupportedError, match="expert kernel SomeExperts has not been verif"):
            layer_checks.check_device_execution(layer, slots=2)
        return
    layer_checks.check_device_execution(layer, slots=2)
    parameters = expert_tensors.expert_parameters(layer)
    assert final[-1] in [parameter.data_ptr() for parameter in parameters]
    dtypes = Counter(parameter.dtype for parameter in parameters)
    assert dtypes == {torch.float8_e4m3fn: 2, torch.float32: 2}  # weights and scales
    held = ExpertWeights(layer, parameters)
    held.hide_slots(NUM_MASTERS, lambda layer: layer.quant_method.moe_kernel)
    held.require_in_place()
