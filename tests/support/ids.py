"""Routing that favours some experts, for the kernels' tests."""

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.types import ExpertShape

__all__ = ["skewed_ids", "zipf_loads"]


def skewed_ids(shape: ExpertShape, tokens: int, seed: int, top_k: int = 3) -> torch.Tensor:
    """(T, K) int32 distinct experts, low ones hot, every ninth token padding."""
    rng = np.random.default_rng(seed)
    experts = shape.num_logical_experts
    noise = rng.gumbel(size=(tokens, experts)) - 1.5 * np.log(np.arange(1, experts + 1))
    ids = np.argsort(-noise, axis=1)[:, :top_k].astype(np.int32)
    ids[::9] = -1
    return torch.from_numpy(ids)


def zipf_loads(
    shape: ExpertShape, exponent: float, seed: int, assignments: int
) -> NDArray[np.int64]:
    """(R, E): each rank's ``assignments``, the n-th hottest expert with weight n ** -exponent."""
    rng = np.random.default_rng(seed)
    experts = shape.num_logical_experts
    weight = rng.permutation(1.0 / np.arange(1, experts + 1) ** exponent)
    return rng.multinomial(assignments, weight / weight.sum(), size=shape.num_ranks)
