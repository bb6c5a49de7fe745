"""Operators that quantise activations, by tensor, by token, and by group of a token."""

import torch

from tests.emulated_gpu.operators.host import in_stream

__all__ = [
    "by_group",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "per_token_group_fp8_quant",
    "per_token_group_quant_int8",
    "silu_and_mul_per_block_quant",
    "static_scaled_fp8_quant",
    "static_scaled_int8_quant",
]

_LEAST_STEPS = 512  # a token's scale in FP8 is at least 1 / (448 * 512)


@in_stream
def per_token_group_fp8_quant(
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool,
) -> None:
    """Each ``group_size`` values of a row have a scale, with ``scale_ue8m0`` a power of two."""
    by_group(input, output_q, output_s, group_size, eps, (fp8_min, fp8_max), scale_ue8m0)


@in_stream
def per_token_group_quant_int8(
    input: torch.Tensor,
    output_q: torch.Tensor,
    output_s: torch.Tensor,
    group_size: int,
    eps: float,
    int8_min: float,
    int8_max: float,
) -> None:
    """As above."""
    by_group(input, output_q, output_s, group_size, eps, (int8_min, int8_max), False)


@in_stream
def silu_and_mul_per_block_quant(
    out: torch.Tensor, input: torch.Tensor, scales: torch.Tensor, group_size: int
) -> None:
    """Of a gate, and what it gates beside it, in FP8 as above."""
    gate, up = input.float().chunk(2, dim=-1)
    limits = torch.finfo(out.dtype)
    given = torch.nn.functional.silu(gate) * up
    by_group(given, out, scales, group_size, 1e-10, (limits.min, limits.max), False)


@in_stream
def dynamic_per_token_scaled_fp8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, scale_ub: torch.Tensor | None
) -> None:
    """Each row has a scale of its own."""
    most, wide = torch.finfo(result.dtype).max, input.float()
    largest = wide.abs().amax(-1, keepdim=True)
    if scale_ub is not None:
        largest = largest.minimum(scale_ub)
    scale.copy_((largest / most).clamp(min=1 / (most * _LEAST_STEPS)).view_as(scale))
    _store(result, wide / scale.view_as(largest))


@in_stream
def dynamic_scaled_fp8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor
) -> None:
    """All have one scale, which is found."""
    scale.fill_(input.float().abs().max() / torch.finfo(result.dtype).max)
    _store(result, input.float() / scale)


@in_stream
def static_scaled_fp8_quant(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor) -> None:
    """All have one scale, which is given."""
    _store(result, input.float() / _only(scale))


@in_stream
def dynamic_scaled_int8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor
) -> None:
    """Each row has a scale of its own."""
    largest = input.float().abs().amax(-1, keepdim=True)
    scale.copy_((largest / 127).view_as(scale))
    _store(result, input.float() * (127 / largest.clamp(min=1e-30)))


@in_stream
def static_scaled_int8_quant(
    result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor
) -> None:
    """All have one scale, which is given."""
    _store(result, input.float() / _only(scale))


def by_group(
    x: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    size: int,
    least: float,
    limits: tuple[float, float],
    is_power_of_two: bool,
) -> None:
    """``x`` (T, H) by groups of ``size`` values, with ``scales`` (T, H / size)."""
    groups = x.float().unflatten(-1, (-1, size))
    found = groups.abs().amax(-1).clamp(min=least) / limits[1]
    if is_power_of_two:
        found = found.clamp(min=1e-10).log2().ceil().exp2()
    scales.copy_(found)
    _store(out, (groups / found[..., None]).clamp(*limits).flatten(-2))


def _only(scale: torch.Tensor) -> torch.Tensor:
    if scale.numel() != 1:
        raise NotImplementedError("the emulated GPU has no values for scales of parts")
    return scale


def _store(out: torch.Tensor, values: torch.Tensor) -> None:
    """Rounded to the nearest that ``out`` has; beyond the largest, to that."""
    limits = torch.finfo(out.dtype) if out.dtype.is_floating_point else torch.iinfo(out.dtype)
    nearest = values if out.dtype.is_floating_point else values.round()
    out.copy_(nearest.clamp(limits.min, limits.max).to(out.dtype))
