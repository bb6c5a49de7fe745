"""MoE layers in the quantised formats that vLLM serves on GPUs, brought into order by its methods.

Each format has vLLM's own configuration, and the kernel that vLLM would choose on a GPU. What needs
a device stands in: repacking keeps all bytes of an expert together, as the real one does.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
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

from tests.support import vllm_gpu, vllm_layers
from tests.support.quantised import SCHEMES, compressed_tensors

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
    config = vllm_layers.engine_config(0, vllm_gpu.NUM_RANKS, "allgather_reducescatter", ["layer"])
    parallel = vllm_layers.parallel_of(0, vllm_gpu.NUM_RANKS, "allgather_reducescatter")
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
    set_attribute(fp8, "process_fp8_weight_tensor_strategy_moe", vllm_gpu.one_scale_per_expert)
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


def _fp8() -> Any:
    return vllm_gpu.fp8_config("dynamic", None)


_FP8 = (fp8, "select_fp8_moe_backend", fp8_kernels)
_Fp8 = fp8_kernels.Fp8MoeBackend
_INT4 = (packed_int4, "select_wna16_moe_backend", int4_kernels)
_NVFP4 = (modelopt, "select_nvfp4_moe_backend", nvfp4_kernels)
_NVFP4_PACKED = (packed_nvfp4, "select_nvfp4_moe_backend", nvfp4_kernels)
_MXFP4 = (mxfp4, "select_mxfp4_moe_backend", mxfp4_kernels)
_Int4, _NvFp4 = int4_kernels.WNA16MoEBackend, nvfp4_kernels.NvFp4MoeBackend
_MxFp4 = mxfp4_kernels.Mxfp4MoeBackend

FORMATS = {
    "fp8-cutlass": Format(_fp8, *_FP8, _Fp8.VLLM_CUTLASS),
    "fp8-blocks": Format(lambda: vllm_gpu.fp8_config("dynamic", [128, 128]), *_FP8, _Fp8.TRITON),
    "fp8-marlin": Format(_fp8, *_FP8, _Fp8.MARLIN),
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
