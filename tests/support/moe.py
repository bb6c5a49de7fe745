"""A Mixture-of-Experts layer stack small enough to check by eye, with every expert's weights known.

Shape letters: E logical experts, H hidden, I inner, T tokens, K experts per token, L masters and
S replica slots per rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tests.support.experts import sum_of_experts
from ultraep_serve.types import ExpertShape

__all__ = ["TinyMoE", "apply_experts", "expert_bytes_equal", "poison"]


@dataclass(frozen=True)
class TinyMoE:
    """Weights of all layers, made from the seed alone, so that every rank can make any of them.

    They are small integers: every sum of products is exact in float32, so any order of summation,
    and any rank that computes it, gives the same bits.
    """

    shape: ExpertShape
    num_layers: int = 3
    hidden: int = 16  # H
    inner: int = 24  # I
    seed: int = 0

    def weights(self, layer: int) -> list[torch.Tensor]:
        """float32 up (E, I, H), down (E, H, I) and bias (E, H): three sizes per expert."""
        rng = np.random.default_rng((self.seed, layer))
        experts, hidden, inner = self.shape.num_logical_experts, self.hidden, self.inner
        shapes = [(experts, inner, hidden), (experts, hidden, inner), (experts, hidden)]
        return [self._numbers(rng, shape) for shape in shapes]

    def masters(self, layer: int, rank: int) -> list[torch.Tensor]:
        """``weights`` of the experts that live on ``rank``, (L, ...) each."""
        first = rank * self.shape.num_masters
        return [
            tensor[first : first + self.shape.num_masters].clone() for tensor in self.weights(layer)
        ]

    def tokens(self, rng: np.random.Generator, num_tokens: int) -> torch.Tensor:
        """Hidden states float32 (T, H)."""
        return self._numbers(rng, (num_tokens, self.hidden))

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-2, 3, size=shape, dtype=np.int8)).float()


def apply_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    weights: list[torch.Tensor],
    first_id: int = 0,
) -> torch.Tensor:
    """Sum of the chosen experts' outputs (T, H); ids outside ``weights`` add nothing.

    ``x`` (T, H), ``topk_weights`` and ``ids`` (T, K); ``weights`` up (N, I, H), down (N, H, I) and
    bias (N, H) of ids first_id to first_id + N - 1. Expert: ``down @ relu(up @ x) + bias``.
    """
    up, down, bias = weights
    local = ids.long() - first_id
    return sum_of_experts(
        x,
        torch.where((ids >= 0) & (local < up.shape[0]), local, -1),
        topk_weights,
        lambda rows, e: torch.relu(rows @ up[e].T) @ down[e].T + bias[e],
    )


def poison(tensors: list[torch.Tensor], num_masters: int) -> None:
    """Overwrite the replica slots of ``tensors`` (L + S, ...) with bytes that read as NaN."""
    for tensor in tensors:
        tensor[num_masters:].view(torch.uint8).fill_(0xFF)


def expert_bytes_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two experts' tensors hold the same bytes (NaN or not)."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
