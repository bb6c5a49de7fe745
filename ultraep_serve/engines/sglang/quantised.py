"""Experts on GPUs, quantised or not: whose kernels take slots, and what must not move.

A copied expert computes the same elsewhere if everything that is its own goes with it
(``movable_parameters`` in ``model.py``) and everything else is the same on all ranks. The latter
depends on the checkpoint: some methods reduce a scale over a rank's own experts.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

from ultraep_serve.balance.agreement import SharedValues

_PLAIN = ("triton", "deep_gemm", "flashinfer_cutlass")
# SGLang's class that prepares a layer's tensors -> the --moe-runner-backend whose kernel takes
# them with slots: expert by expert in every tensor, routed before. Verified with SGLang 0.5.23.
_RUNNERS: dict[str, tuple[str, ...]] = {
    "UnquantizedFusedMoEMethod": _PLAIN,
    "Fp8MoEMethod": _PLAIN,
    "W8A8Int8MoEMethod": ("triton",),
    "W8A8FP8MoEMethod": ("triton",),
    "BlockInt8MoEMethod": ("triton",),
    "ModelOptFp8MoEMethod": ("triton",),
    "ModelOptNvFp4FusedMoEMethod": ("flashinfer_cutlass", "marlin"),
    "Mxfp4MoEMethod": ("marlin",),
    "MoeWNA16Method": ("triton",),
    "AWQMoEScheme": ("marlin",),
    "GPTQMarlinMoEScheme": ("marlin",),
    "CompressedTensorsW8A8Fp8MoE": ("triton",),
    "CompressedTensorsWNA16MoE": ("marlin",),
}
# Those whose tensors are also in the megakernel's order, expert by expert.
_MEGAKERNEL = ("Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod")
_ROUTING = ("flashinfer_trtllm", "flashinfer_mxfp4")  # inside the kernel


def wrong_kernel(layer: FusedMoE) -> str | None:
    """Why SGLang's kernels on a GPU cannot run ``layer`` with slots; None if they can."""
    owner = _owner(layer)
    accepted = _RUNNERS.get(type(owner).__name__)
    if accepted is None:
        return (
            f"quantisation {type(owner).__name__} has not been verified; use an unquantised, FP8, "
            "INT8, NVFP4, MXFP4, AWQ, GPTQ or compressed-tensors checkpoint"
        )
    if getattr(owner, "use_mxfp8", False) or getattr(owner, "is_fp4_expert", False):
        return "MXFP8 and FP4 experts of an FP8 checkpoint have not been verified; use another one"
    found = None if layer.runner_backend is None else layer.runner_backend.value
    if found in accepted:
        return None
    reason = "routes inside its kernel" if found in _ROUTING else "has not been verified"
    return (
        f"MoE runner {found} {reason} with {type(owner).__name__}; "
        f"use --moe-runner-backend {' or '.join(accepted)}"
    )


def wrong_megakernel(layer: FusedMoE) -> str | None:
    """As ``wrong_kernel``, with --moe-a2a-backend megamoe."""
    name = type(_owner(layer)).__name__
    if name in _MEGAKERNEL and layer._mega_moe_weights_built:
        return None
    return f"the megakernel has not been verified with {name}; use --moe-a2a-backend deepep or none"


def shared_values(layer: FusedMoE) -> SharedValues:
    """What ``layer`` computes with that belongs to no single expert."""
    values = _shared_values(layer)
    return SharedValues.of(layer.layer_name, values, "a checkpoint with dynamic activation scales")


def _owner(layer: FusedMoE) -> Any:
    """What makes and prepares the layer's tensors; some methods leave that to a scheme."""
    return layer.quant_method if layer.scheme is None else layer.scheme


def _shared_values(layer: FusedMoE) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Tensors and numbers of ``layer``, and of what computes it, that belong to no one expert."""
    own = {
        id(tensor)
        for name, tensor in layer.named_parameters()
        if tensor.dim() and tensor.shape[0] == layer.num_local_experts
    }
    for holder in (layer, layer.quant_method, layer.scheme):
        values = {} if holder is None else dict(vars(holder))
        if holder is layer:
            values |= {**layer._parameters, **layer._buffers}
        for name, value in sorted(values.items()):
            if isinstance(value, torch.Tensor | float) and id(value) not in own:
                yield name, value
