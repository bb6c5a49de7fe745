"""count: topk_ids (T, K) logical -> load (E,) assignments per expert. Twin: ``device.count``."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_kernels.host._compile import compiled


@compiled
def _count_kernel(topk_ids: Any, load: Any) -> int:
    unknown = 0
    for expert in topk_ids:
        if 0 <= expert < load.size:
            load[expert] += 1
        elif expert != -1:
            unknown += 1
    return unknown


def count(topk_ids: torch.Tensor, num_logical_experts: int) -> tuple[NDArray[np.int64], int]:
    """Load per logical expert (E,) int64, and how many ids were neither an expert nor padding.

    ``topk_ids`` (T, K) int32 or int64 on CPU, -1 is padding and never counts.
    """
    load = np.zeros(num_logical_experts, dtype=np.int64)
    unknown = _count_kernel(topk_ids.reshape(-1).numpy(), load)
    return load, unknown
