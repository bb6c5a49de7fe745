"""SGLang's Triton expert kernels, in bfloat16 and FP8 by blocks.

Its other kernels come through its layers, which need all of its groups; they are not tried here.
"""

from contextlib import AbstractContextManager

import torch
from expert_layer import BLOCK, Compute, ExpertKernel, Masters, Sizes


def ready(device: torch.device) -> AbstractContextManager[object]:
    """Publish settings, which kernels read; a group is for memory that ranks share."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    load_plugins()  # as SGLang does wherever it runs
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    return get_parallel().override(tp_group=None)


def kernels(sizes: Sizes, device: torch.device) -> list[ExpertKernel | str]:
    """Both formats."""
    return [_Triton(sizes, "bf16"), _Triton(sizes, "fp8-block")]


class _Triton:
    """``fused_experts``, which takes local ids and leaves out those that are -1."""

    name = "sglang triton"

    def __init__(self, sizes: Sizes, kind: str) -> None:
        self.format = kind
        self._sizes = sizes

    def order(self, masters: Masters, rank: int) -> list[torch.Tensor]:
        """As the checkpoint has them."""
        tensors = masters.gate_up, masters.down, masters.gate_up_scale, masters.down_scale
        return [tensor for tensor in tensors if tensor is not None]

    def prepare(self, tensors: list[torch.Tensor], rank: int) -> Compute:
        """See ``ExpertKernel``."""
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        sizes, local = self._sizes, self._sizes.shape.num_local
        config = MoeRunnerConfig(
            num_experts=sizes.num_physical,
            num_local_experts=local,
            hidden_size=sizes.hidden,
            intermediate_size_per_partition=sizes.inner,
            top_k=sizes.top_k,
            params_dtype=torch.bfloat16,
            inplace=False,
        )
        gate_up, down, *scales = tensors
        named = {}
        if scales:
            named = {
                "use_fp8_w8a8": True,
                "w1_scale": scales[0],
                "w2_scale": scales[1],
                "block_shape": [BLOCK, BLOCK],
            }

        def run(x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
            ids = physical - rank * local
            ids = torch.where((ids >= 0) & (ids < local), ids, -1)
            chosen = StandardTopKOutput(weights, ids, weights)
            return fused_experts(x, gate_up, down, chosen, config, **named)

        return run
