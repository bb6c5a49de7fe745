"""Expert parallelism on a GPU: SGLang's own dispatch, expert kernels and combine, with slots.

Nothing of theirs is replaced: they are told of R * (L + S) experts instead of E, and take physical
ids.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch, set_is_extend_in_batch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import get_deepep_mode, get_moe_a2a_backend

from ultraep_serve.adapters.sglang.checks import check_device_execution
from ultraep_serve.adapters.sglang.physical import PhysicalExperts

__all__ = ["DeviceExperts"]


class DeviceExperts(PhysicalExperts):
    """``Execution`` where SGLang's kernels run."""

    def check(self, layer: FusedMoE) -> None:
        check_device_execution(layer)

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """As in a prefill; returns when the device is done.

        More tokens than DeepEP's buffer holds go one batch after another.
        """
        weights, ids = topk_weights.to(x.device), physical.to(x.device)
        size = _most_tokens(x.shape[0])
        outputs = []
        with torch.inference_mode(), _in_prefill():
            for start in range(0, x.shape[0], size):
                part = slice(start, start + size)
                chosen = StandardTopKOutput(weights[part], ids[part], router_logits=weights[part])
                outputs.append(layer.forward_impl(x[part], chosen))
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return torch.cat(outputs)


def _most_tokens(num_tokens: int) -> int:
    """How many of ``num_tokens`` tokens of a rank SGLang dispatches at once in a prefill."""
    if not get_moe_a2a_backend().is_deepep():
        return num_tokens
    if not get_deepep_mode().resolve(is_extend_in_batch=True).is_low_latency():
        return num_tokens
    return min(num_tokens, int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()))


@contextmanager
def _in_prefill() -> Iterator[None]:
    """DeepEP's dispatcher asks for the phase; SGLang's own warm-ups tell it the same way."""
    before = get_is_extend_in_batch()
    set_is_extend_in_batch(True)
    try:
        yield
    finally:
        set_is_extend_in_batch(before)
