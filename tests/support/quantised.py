"""Quantised copies of checkpoints: the experts' matrices only, rounded here, all else as it was.

The formats are those that engines load: Hugging Face's ``quantization_config`` and the tensors that
it announces. Knows no engine.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file

__all__ = ["MATRIX", "SCHEMES", "compressed_tensors", "quantise"]

MATRIX = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_BLOCK = 128  # rows and columns that share a scale in FP8, columns in INT4
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by code; 8 more are negative
_FP4_MAX, _FP8_MAX = 6.0, 448.0

Tensors = dict[str, torch.Tensor]  # by what follows the matrix's name


def quantise(source: Path, target: Path, scheme: str) -> Path:
    """Write the checkpoint of ``source`` to ``target`` with its experts in ``scheme``; return it.

    Sizes of expert matrices must be multiples of 128. Raises ValueError for a checkpoint without
    matrices of single experts (``MATRIX``).
    """
    convert, config = SCHEMES[scheme]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    matrices = [name for name in tensors if MATRIX.search(name)]
    if not matrices:
        raise ValueError(f"{source} has no matrices of single experts")
    others = [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]
    for name in matrices:
        prefix = name.removesuffix(".weight")
        made = convert(tensors.pop(name).float())
        tensors |= {f"{prefix}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    left_alone = sorted(name.removesuffix(".weight") for name in set(others) - set(matrices))
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = config(left_alone)
    (target / "config.json").write_text(json.dumps(settings, indent=2))
    return target


def _fp8(matrix: torch.Tensor) -> Tensors:
    """DeepSeek's: one scale (rows / 128, columns / 128) per block."""
    rows, columns = matrix.shape
    blocks = matrix.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _FP8_MAX
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.view(rows, columns), "weight_scale_inv": scale}


def _fp8_config(left_alone: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": left_alone,
    }


def _int8(matrix: torch.Tensor) -> Tensors:
    """One scale (rows, 1) per output channel."""
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return {"weight": (matrix / scale).round().to(torch.int8), "weight_scale": scale}


def _int4(matrix: torch.Tensor) -> Tensors:
    """One scale per row and group of columns; eight codes of 4 bits in an int32."""
    rows, columns = matrix.shape
    groups = matrix.view(rows, columns // _BLOCK, _BLOCK)
    scale = groups.abs().amax(dim=2).clamp(min=1e-12).div(7).bfloat16()
    codes = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7).to(torch.int8)
    return {
        "weight_packed": pack_to_int32(codes.view(rows, columns), num_bits=4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }


def compressed_tensors(preset: str, form: str, left_alone: list[str]) -> dict[str, Any]:
    """Of that library's scheme ``preset``."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json", exclude_none=True)},
        "ignore": left_alone,
    }


def _mxfp4(matrix: torch.Tensor) -> Tensors:
    """One power of two per row and group of 32, as an exponent biased by 127."""
    groups = matrix.view(matrix.shape[0], -1, 32)
    largest = groups.abs().amax(dim=2).clamp(min=1e-12)
    exponent = (largest / _FP4_MAX).log2().ceil().clamp(-127, 127)
    codes = _fp4_codes(groups / exponent.exp2().unsqueeze(2)).view(matrix.shape)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (exponent + 127).byte()}


def _nvfp4(matrix: torch.Tensor) -> Tensors:
    """ModelOpt's: an FP8 scale per row and 16 columns, a float32 one per matrix and for inputs."""
    groups = matrix.view(matrix.shape[0], -1, 16)
    whole = matrix.abs().max().clamp(min=1e-12) / (_FP4_MAX * _FP8_MAX)
    scale = (groups.abs().amax(dim=2) / _FP4_MAX / whole).to(torch.float8_e4m3fn)
    divisor = (scale.float() * whole).clamp(min=1e-12).unsqueeze(2)
    codes = _fp4_codes(groups / divisor).view(matrix.shape)
    return {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(1 / _FP8_MAX),
    }


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest of the 16 values of FP4 (E2M1), uint8."""
    nearest = (values.abs().unsqueeze(-1) - _FP4).abs().argmin(dim=-1).byte()
    return nearest | (values < 0).byte() << 3


SCHEMES: dict[
    str, tuple[Callable[[torch.Tensor], Tensors], Callable[[list[str]], dict[str, Any]]]
] = {
    "fp8": (_fp8, _fp8_config),
    "int8": (_int8, partial(compressed_tensors, "W8A8", "int-quantized")),
    "int4": (_int4, partial(compressed_tensors, "W4A16", "pack-quantized")),
    "mxfp4": (_mxfp4, lambda left_alone: {"quant_method": "mxfp4"}),
    "nvfp4": (
        _nvfp4,
        lambda left_alone: {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": left_alone,
        },
    ),
}
