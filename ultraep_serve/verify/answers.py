"""What a layer answers with copies is what it answers without: ids that use copies, and a bound."""

import numpy as np
import torch
from ultraep_kernels.host.reroute import physical_table

from ultraep_serve.types import ExpertShape, IntArray

__all__ = ["bound_of", "largest_difference", "using_copies"]

# Largest difference of two answers, in parts of the largest value: sums are taken in another order.
_BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3}
_BOUND = 2e-2  # of other types, which have no more bits than bfloat16


def bound_of(dtype: torch.dtype) -> float:
    """What ``largest_difference`` may be in layers of ``dtype``."""
    return _BOUNDS.get(dtype, _BOUND)


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of two outputs (T, H), in parts of the largest value expected; NaN where one has NaN."""
    size = max(float(expected.abs().max()), torch.finfo(expected.dtype).tiny)
    return float((found.float() - expected.float()).abs().max()) / size


def using_copies(
    logical: torch.Tensor, slot_expert: IntArray | None, shape: ExpertShape
) -> torch.Tensor:
    """Physical ids (T, K) of masters, and of copies of those experts that have one.

    ``slot_expert`` (R, S); None: no copies.
    """
    empty = np.full((shape.num_ranks, shape.num_slots), -1, np.int32)
    if slot_expert is not None:
        empty[:, : shape.num_replica_slots] = slot_expert
    table = physical_table(empty, shape.num_masters)
    every = np.arange(shape.num_logical_experts)
    owner = every // shape.num_masters
    chosen = table[every, owner]
    table[every, owner] = -1
    chosen = np.where(table.max(axis=1) >= 0, table.max(axis=1), chosen)
    return torch.from_numpy(chosen.astype(np.int32)).to(logical.device)[logical]
