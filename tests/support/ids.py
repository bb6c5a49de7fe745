"""Routing that favours some experts, for the kernels' tests."""

import numpy as np
import torch

from ultraep_serve.types import ExpertShape

__all__ = ["skewed_ids"]


def skewed_ids(shape: ExpertShape, tokens: int, seed: int, top_k: int = 3) -> torch.Tensor:
    """(T, K) int32 distinct experts, low ones hot, every ninth token padding."""
    rng = np.random.default_rng(seed)
    experts = shape.num_logical_experts
    noise = rng.gumbel(size=(tokens, experts)) - 1.5 * np.log(np.arange(1, experts + 1))
    ids = np.argsort(-noise, axis=1)[:, :top_k].astype(np.int32)
    ids[::9] = -1
    return torch.from_numpy(ids)
