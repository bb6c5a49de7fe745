"""Quantised copies of checkpoints: the experts' matrices only, rounded here, all else as it was.

The formats are those that engines load: Hugging Face's ``quantization_config`` and the tensors that
it announces. Knows no engine. What a format says is also read back, for who computes without it.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file

MATRIX = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_BESIDE = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}
_GATE_OR_UP = re.compile(r"(gate_proj|up_proj|w1|w3)(?=\.weight$)")
_BLOCK = 128  # rows and columns that share a scale in FP8, columns in INT4
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by code; 8 more are negative
_AWQ_PLACES = 0, 4, 1, 5, 2, 6, 3, 7  # in a word of 4-bit codes, of eight outputs
_FP4_MAX, _FP8_MAX = 6.0, 448.0
_INPUT_SCALE = 1 / 16  # of FP8 by tensors

Tensors = dict[str, torch.Tensor]  # by what follows the matrix's name


class Scheme(NamedTuple):
    """How a matrix is written, what is read of that (float32), and the checkpoint's settings.

    A matrix is written with the largest magnitude of those that share a scale of the whole with it.
    ``rounded`` is what engines multiply it by in the place of rows (T, K) float32, if that does not
    depend on other rows.
    """

    write: Callable[[torch.Tensor, torch.Tensor], Tensors]
    read: Callable[[Tensors], torch.Tensor]
    config: Callable[[list[str]], dict[str, Any]]  # of the matrices that are left alone
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None


def quantise(source: Path, target: Path, scheme: str) -> Path:
    """Write the checkpoint of ``source`` to ``target`` with its experts in ``scheme``; return it.

    Sizes of expert matrices must be multiples of 128. Raises ValueError for a checkpoint without
    matrices of single experts (``MATRIX``).
    """
    tensors, settings = _load(source)
    matrices = [name for name in tensors if MATRIX.search(name)]
    if not matrices:
        raise ValueError(f"{source} has no matrices of single experts")
    others = [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]
    largest = {name: tensors[name].abs().max().float() for name in matrices}
    for name in matrices:
        prefix = name.removesuffix(".weight")
        beside = _GATE_OR_UP.sub(lambda found: _BESIDE[found[0]], name)  # engines join them
        both = torch.maximum(largest[name], largest[beside])
        made = SCHEMES[scheme].write(tensors.pop(name).float(), both)
        tensors |= {f"{prefix}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()}
    left_alone = sorted(name.removesuffix(".weight") for name in set(others) - set(matrices))
    settings["quantization_config"] = SCHEMES[scheme].config(left_alone)
    return _save(source, target, tensors, settings)


def dequantise(source: Path, target: Path, scheme: str) -> Path:
    """Write to ``target`` what the checkpoint of ``source`` says in ``scheme``; return that."""
    tensors, settings = _load(source)
    by_matrix: dict[str, Tensors] = {}
    for name in [name for name in tensors if ".experts." in name]:
        matrix, _, suffix = name.rpartition(".")
        by_matrix.setdefault(matrix, {})[suffix] = tensors.pop(name)
    for matrix, written in by_matrix.items():
        tensors[f"{matrix}.weight"] = SCHEMES[scheme].read(written).contiguous()
    del settings["quantization_config"]
    return _save(source, target, tensors, settings)


def _load(source: Path) -> tuple[Tensors, dict[str, Any]]:
    tensors: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors, json.loads((source / "config.json").read_text())


def _save(source: Path, target: Path, tensors: Tensors, settings: dict[str, Any]) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(settings, indent=2))
    return target


def _fp8(matrix: torch.Tensor, _: torch.Tensor) -> Tensors:
    """DeepSeek's: one scale (rows / 128, columns / 128) per block."""
    rows, columns = matrix.shape
    blocks = matrix.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _FP8_MAX
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.view(rows, columns), "weight_scale_inv": scale}


def _fp8_read(written: Tensors) -> torch.Tensor:
    scale = written["weight_scale_inv"].repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return written["weight"].float() * scale


def _fp8_tensor(matrix: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """One scale for the matrix, and one for inputs."""
    scale = largest.clamp(min=1e-12) / _FP8_MAX
    return {
        "weight": (matrix / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.tensor(_INPUT_SCALE),
    }


def _scaled(written: Tensors) -> torch.Tensor:
    return written["weight"].float() * written["weight_scale"]


def _fp8_config(left_alone: list[str], **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": left_alone,
        **others,
    }


def _fp8_rounded(rows: torch.Tensor) -> torch.Tensor:
    """By blocks of columns, each with a scale for each row."""
    blocks = rows.unflatten(1, (-1, _BLOCK))
    scale = blocks.abs().amax(2, keepdim=True).clamp(min=1e-10) / _FP8_MAX
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


def _fp8_tensor_rounded(rows: torch.Tensor) -> torch.Tensor:
    nearest = (rows / _INPUT_SCALE).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return nearest.float() * _INPUT_SCALE


def _int8_rounded(rows: torch.Tensor) -> torch.Tensor:
    """One scale for each row."""
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-10) / 127
    return (rows / scale).round() * scale


def _int8(matrix: torch.Tensor, _: torch.Tensor) -> Tensors:
    """One scale (rows, 1) per output channel."""
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return {"weight": (matrix / scale).round().to(torch.int8), "weight_scale": scale}


def _int4(matrix: torch.Tensor, _: torch.Tensor) -> Tensors:
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


def _int4_read(written: Tensors) -> torch.Tensor:
    rows, columns = written["weight_shape"].tolist()
    codes = written["weight_packed"][:, :, None] >> torch.arange(0, 32, 4) & 15
    scale = written["weight_scale"].float().repeat_interleave(_BLOCK, 1)
    return (codes.view(rows, columns) - 8) * scale


def _awq(matrix: torch.Tensor, _: torch.Tensor) -> Tensors:
    """AWQ's: by input, with a scale and a zero point of its own per group and output."""
    groups = matrix.T.unflatten(0, (-1, _BLOCK))
    least, most = groups.amin(1), groups.amax(1)
    scale = ((most - least) / 15).clamp(min=1e-5).bfloat16()
    zeros = (-least / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return {
        "qweight": _awq_words(codes.flatten(0, 1)),
        "qzeros": _awq_words(zeros),
        "scales": scale,
    }


def _awq_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes (R, N) as words (R, N / 8) int32."""
    shifts = 4 * torch.tensor(_AWQ_PLACES)
    return (codes.int().unflatten(1, (-1, 8)) << shifts).sum(2).int()


def _awq_read(written: Tensors) -> torch.Tensor:
    shifts = 4 * torch.tensor(_AWQ_PLACES)
    codes, zeros = (
        (written[name][..., None] >> shifts & 15).flatten(1) for name in ("qweight", "qzeros")
    )
    values = codes.unflatten(0, (-1, _BLOCK)) - zeros[:, None]
    return (values * written["scales"].float()[:, None]).flatten(0, 1).T


def _awq_config(left_alone: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": _BLOCK,
        "zero_point": True,
        "modules_to_not_convert": left_alone,
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


def _mxfp4(matrix: torch.Tensor, _: torch.Tensor) -> Tensors:
    """One power of two per row and group of 32, as an exponent biased by 127."""
    groups = matrix.view(matrix.shape[0], -1, 32)
    largest = groups.abs().amax(dim=2).clamp(min=1e-12)
    exponent = (largest / _FP4_MAX).log2().ceil().clamp(-127, 127)
    codes = _fp4_codes(groups / exponent.exp2().unsqueeze(2)).view(matrix.shape)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (exponent + 127).byte()}


def _mxfp4_read(written: Tensors) -> torch.Tensor:
    return _fp4_values(written["weight"], (written["weight_scale"].float() - 127).exp2())


def _nvfp4(matrix: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """ModelOpt's: an FP8 scale per row and 16 columns, a float32 one per matrix and for inputs."""
    groups = matrix.view(matrix.shape[0], -1, 16)
    whole = largest.clamp(min=1e-12) / (_FP4_MAX * _FP8_MAX)
    scale = (groups.abs().amax(dim=2) / _FP4_MAX / whole).to(torch.float8_e4m3fn)
    divisor = (scale.float() * whole).clamp(min=1e-12).unsqueeze(2)
    codes = _fp4_codes(groups / divisor).view(matrix.shape)
    return {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(1 / _FP8_MAX),
    }


def _nvfp4_read(written: Tensors) -> torch.Tensor:
    scale = written["weight_scale"].float() * written["weight_scale_2"]
    return _fp4_values(written["weight"], scale)


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest of the 16 values of FP4 (E2M1), uint8."""
    nearest = (values.abs().unsqueeze(-1) - _FP4).abs().argmin(dim=-1).byte()
    return nearest | (values < 0).byte() << 3


def _fp4_values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of two codes a byte, whose rows have a scale for every so many columns."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    values = torch.cat([_FP4, -_FP4])[codes.long()]
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


SCHEMES = {
    "fp8": Scheme(
        _fp8, _fp8_read, partial(_fp8_config, weight_block_size=[_BLOCK, _BLOCK]), _fp8_rounded
    ),
    "fp8-tensor": Scheme(
        _fp8_tensor, _scaled, partial(_fp8_config, activation_scheme="static"), _fp8_tensor_rounded
    ),
    "int8": Scheme(
        _int8, _scaled, partial(compressed_tensors, "W8A8", "int-quantized"), _int8_rounded
    ),
    "int4": Scheme(_int4, _int4_read, partial(compressed_tensors, "W4A16", "pack-quantized")),
    "awq": Scheme(_awq, _awq_read, _awq_config),
    "mxfp4": Scheme(_mxfp4, _mxfp4_read, lambda left_alone: {"quant_method": "mxfp4"}),
    "nvfp4": Scheme(
        _nvfp4,
        _nvfp4_read,
        lambda left_alone: {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": left_alone,
        },
    ),
}
