"""Grouped products of torch, which show that the check itself is right, on any machine."""

from contextlib import AbstractContextManager, nullcontext

import torch
from expert_layer import Compute, ExpertKernel, Masters, Sizes
from virtual_layer import compute


def ready(device: torch.device) -> AbstractContextManager[object]:
    """What has to be around calls of the kernels: nothing."""
    return nullcontext()


def kernels(sizes: Sizes, device: torch.device) -> list[ExpertKernel | str]:
    """One."""
    return [_Grouped(sizes)]


class _Grouped:
    """``torch._grouped_mm`` over rows sorted by expert."""

    name, format = "torch._grouped_mm", "bf16"

    def __init__(self, sizes: Sizes) -> None:
        self._local = sizes.shape.num_local

    def order(self, masters: Masters, rank: int) -> list[torch.Tensor]:
        """As the checkpoint has them."""
        return [masters.gate_up, masters.down]

    def prepare(self, tensors: list[torch.Tensor], rank: int) -> Compute:
        """See ``ExpertKernel``."""

        def run(x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
            local = physical.long() - rank * self._local
            local = torch.where((local >= 0) & (local < self._local), local, self._local)
            order = local.reshape(-1).argsort(stable=True)
            token = order // physical.shape[1]
            counts = torch.zeros(self._local + 1, dtype=torch.int64, device=x.device)
            counts.index_add_(0, local.reshape(-1), torch.ones_like(local.reshape(-1)))
            ends = counts.cumsum(0)[:-1].int()
            rows = compute(x[token], ends, *tensors)
            mine = (local.reshape(-1)[order] < self._local)[:, None]  # rows behind are undefined
            weighted = torch.where(mine, rows, 0.0).float() * weights.reshape(-1)[order, None]
            return torch.zeros(x.shape, device=x.device).index_add_(0, token, weighted)

        return run
