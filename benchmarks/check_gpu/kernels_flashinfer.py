"""FlashInfer's fused experts for Hopper and Blackwell, without an engine.

They are compiled when first called, unless the package flashinfer-jit-cache is there.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from expert_layer import Compute, ExpertKernel, Masters, Sizes

__all__ = ["kernels", "ready"]


def ready(device: torch.device) -> AbstractContextManager[object]:
    """What has to be around calls of the kernels: nothing."""
    return nullcontext()


def kernels(sizes: Sizes, device: torch.device) -> list[ExpertKernel | str]:
    """CUTLASS in bfloat16, and in FP8 by blocks, which Hopper alone has."""
    offered: list[ExpertKernel | str] = [_FusedExperts(sizes, "bf16")]
    if torch.cuda.get_device_capability(device) == (9, 0):
        return [*offered, _FusedExperts(sizes, "fp8-block")]
    return [*offered, "cutlass_fused_moe, fp8-block: Hopper alone has it"]


class _FusedExperts:
    """``flashinfer.fused_moe.cutlass_fused_moe``; a rank's experts are a range of physical ids."""

    name = "cutlass_fused_moe"

    def __init__(self, sizes: Sizes, kind: str) -> None:
        self.format = kind
        self._num_ranks = sizes.shape.num_ranks

    def order(self, masters: Masters, rank: int) -> list[torch.Tensor]:
        """Up before gate, scales too."""
        tensors = [_up_first(masters.gate_up), masters.down]
        if masters.gate_up_scale is None or masters.down_scale is None:
            return tensors
        return [*tensors, _up_first(masters.gate_up_scale), masters.down_scale]

    def prepare(self, tensors: list[torch.Tensor], rank: int) -> Compute:
        """See ``ExpertKernel``."""
        from flashinfer.fused_moe import cutlass_fused_moe

        gate_up, down, *scales = tensors

        def run(x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(x)
            cutlass_fused_moe(
                x,
                physical,
                weights,
                gate_up,
                down,
                x.dtype,
                scales,
                ep_size=self._num_ranks,
                ep_rank=rank,
                output=output,
                use_deepseek_fp8_block_scale=bool(scales),
            )
            return output

        return run


def _up_first(tensor: torch.Tensor) -> torch.Tensor:
    gate, up = tensor.chunk(2, dim=1)
    return torch.cat([up, gate], dim=1)
