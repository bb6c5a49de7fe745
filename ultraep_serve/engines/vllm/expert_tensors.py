"""The tensors of vLLM's experts: which of them a copy takes along, and what all experts share.

A quantisation method brings weights and scales into the order of the kernel that vLLM chose, and
hands the scales over in a configuration (``FusedMoEQuantConfig``). Slots are added by replacing the
data of the layer's parameters in place. So what the kernel reads through a parameter with one entry
per expert moves with the expert, in any format. What it reads from elsewhere must be one value for
all experts, the same on all ranks: a rank that takes a scale from its own experts would compute a
copy with another scale than the master's rank does. Verified with 0.32 and 0.33.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from ultraep_serve.balance.agreement import SharedValues
from ultraep_serve.engines.vllm.megakernel import adapter_of, reads_only
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import ExpertShape

_PARTS = ("a1", "a2", "w1", "w2")  # of a kernel's configuration

# By the type of a kernel's weights, as its configuration names it: --moe-backend values whose
# kernels are balanced.
_OTHER_KERNELS = {
    "nvfp4": "marlin or flashinfer_cutlass",
    "mxfp4": "marlin",
    "mxfp8": "marlin",
    "int4": "marlin",
}


def other_kernel(layer: RoutedExperts) -> str:
    """The flag that has vLLM choose a kernel for ``layer`` that can be balanced."""
    one_sided = layer.moe_config.moe_parallel_config.use_fi_nvl_one_sided_kernels
    plain = "flashinfer_cutlass" if one_sided else "triton"  # vLLM has no Triton kernel for it
    return f"--moe-backend {_OTHER_KERNELS.get(_weight_type(layer), plain)}"


def expert_parameters(layer: RoutedExperts) -> list[torch.nn.Parameter]:
    """The parameters (L, ...) that make up ``layer``'s experts, in the order of their names.

    Which they are is vLLM's own contract, ``get_expert_weights``. It asserts that they can be
    viewed expert by expert. Raises UnsupportedError where the kernel's layout does not allow that.
    """
    try:
        movable = {weight.data_ptr() for weight in layer.get_expert_weights()}
    except (AssertionError, RuntimeError) as error:
        raise UnsupportedError(
            f"{layer.layer_name}: the expert kernel's weight layout cannot be split by expert; "
            f"use {other_kernel(layer)}"
        ) from error
    found = [parameter for parameter in layer.parameters() if parameter.data_ptr() in movable]
    for name in ("w13_weight", "w2_weight"):
        if not any(getattr(layer, name) is parameter for parameter in found):
            raise UnsupportedError(
                f"{layer.layer_name}: {_kernel_name(layer)} keeps {name} outside of the layer's "
                f"parameters; use {other_kernel(layer)}"
            )
    for parameter in found:
        if parameter.shape[0] != layer.local_num_experts:
            raise UnsupportedError(
                f"{layer.layer_name}: expert tensor {tuple(parameter.shape)} does not hold "
                f"{layer.local_num_experts} experts one after another; use {other_kernel(layer)}"
            )
    return found


def shared_values(layer: RoutedExperts, parameters: Sequence[torch.nn.Parameter]) -> SharedValues:
    """What ``layer``'s kernel reads beside its experts' own ``parameters``.

    Raises UnsupportedError where something of a single expert is not among them.
    """
    remedy = "a checkpoint with dynamic activation scales"
    if _weight_type(layer) == "nvfp4":
        remedy = "--moe-backend marlin, which needs no activation scales"
    return SharedValues.of(layer.layer_name, _shared_values(layer, parameters), remedy)


def fit_shared_values(
    experts: FusedMoEExperts, parameters: Sequence[torch.nn.Parameter], shape: ExpertShape
) -> None:
    """Where ``experts`` read a shared value once per master, have them read L + S of them.

    The experts' own ``parameters`` get their rows for slots otherwise.
    """
    moving = {id(parameter) for parameter in parameters}
    for _, part, field in _scale_fields(experts):
        value = getattr(part, field)
        is_shared = isinstance(value, torch.Tensor) and id(value) not in moving
        if is_shared and _rows(value) == shape.num_masters:
            more = value.data[:1].expand(shape.num_local, *value.shape[1:])
            setattr(part, field, more.contiguous())


def with_own_scales(config: FusedMoEQuantConfig) -> FusedMoEQuantConfig:
    """A copy of ``config`` whose fields can be changed; tensors are the same."""
    own = copy.copy(config)
    for name in _PARTS:
        setattr(own, f"_{name}", copy.copy(getattr(config, f"_{name}")))
    return own


def is_as_in_checkpoint(layer: RoutedExperts) -> bool:
    """Whether ``layer``'s kernel reads experts in the order in which a checkpoint has them."""
    is_plain = isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
    return is_plain and _kernel_name(layer) in ("TritonExperts", "BatchedTritonExperts")


def _shared_values(
    layer: RoutedExperts, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor]]:
    if (adapter := adapter_of(_kernel(layer))) is not None:
        if not reads_only(adapter, parameters):
            raise UnsupportedError(
                f"{layer.layer_name}: {_kernel_name(layer)} keeps tensors of its experts outside "
                f"of the layer's parameters; use {other_kernel(layer)}"
            )
        return  # it reads no other parameters, nor scales of its configuration
    moving = {id(parameter) for parameter in parameters}
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    for name, value in [*layer.named_parameters(), *_read_by(_kernel(layer))]:
        if id(value) in moving:
            continue
        problem = None
        if not isinstance(value, torch.Tensor):
            problem = "keeps its experts' scales where they cannot be copied from"
        elif value.untyped_storage().data_ptr() in storages:
            problem = "keeps a view of an expert tensor, which would be left behind"
        elif _rows(value) == layer.local_num_experts and not _all_rows_equal(value):
            problem = "has one of its own for every expert, which would be left behind"
        if problem is not None:
            raise UnsupportedError(
                f"{layer.layer_name}: {name} of {_kernel_name(layer)} cannot be moved: the kernel "
                f"{problem}; use {other_kernel(layer)}"
            )
        yield name, value


def _read_by(experts: FusedMoEExperts) -> Iterator[tuple[str, Any]]:
    """What the kernel is handed in its configuration, and the tensors that it keeps, by name."""
    for name, part, field in _scale_fields(experts):
        value = getattr(part, field)
        if value is not None:
            yield f"{name} {field}", value
    for name, value in vars(experts).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, FusedMoEExperts):  # one that chooses between two
            yield from _read_by(value)


def _scale_fields(experts: FusedMoEExperts) -> Iterator[tuple[str, Any, str]]:
    """What may hold a tensor in the kernel's configuration: name and part, and the part's field."""
    for name in _PARTS:
        part = getattr(experts.quant_config, f"_{name}")
        for field in fields(part):
            if field.name not in ("dtype", "shape"):
                yield name, part, field.name


def _weight_type(layer: RoutedExperts) -> str:
    config = layer.quant_method.moe_quant_config
    return str(config.weight_quant_dtype) if config is not None else ""


def _kernel(layer: RoutedExperts) -> FusedMoEExperts:
    experts: FusedMoEExperts = layer.quant_method.moe_kernel.fused_experts
    return experts


def _kernel_name(layer: RoutedExperts) -> str:
    return type(_kernel(layer)).__name__


def _rows(value: torch.Tensor) -> int | None:
    return value.shape[0] if value.dim() else None


def _all_rows_equal(value: torch.Tensor) -> bool:
    content = value.data.cpu().contiguous().view(-1).view(torch.uint8)
    rows = content.view(value.shape[0], value[0].numel() * value.element_size())
    return bool((rows == rows[:1]).all())
