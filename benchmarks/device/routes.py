"""Made-up routing: every rank's own tokens choose experts, some far more often than others."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_lab.imbalance import imbalance
from ultraep_lab.workloads import Workload, chances, segments
from ultraep_serve.types import ExpertShape


@dataclass(frozen=True)
class Routes:
    """One layer of one batch."""

    shape: ExpertShape
    ids: torch.Tensor  # (R, T, K) int32 on the device

    @property
    def loads(self) -> NDArray[np.int64]:
        """(R, E): what each rank's tokens chose."""
        experts = self.shape.num_logical_experts
        rows = [torch.bincount(own.reshape(-1), minlength=experts) for own in self.ids]
        return torch.stack(rows).cpu().numpy()

    def figures(self) -> dict[str, Any]:
        """What it is, for a row of the report."""
        shape = self.shape
        return {
            "ranks": shape.num_ranks,
            "experts": shape.num_logical_experts,
            "slots": shape.num_replica_slots,
            "tokens_per_rank": self.ids.shape[1],
            "top_k": self.ids.shape[2],
            "imbalance_before": imbalance(self.loads.sum(0).reshape(shape.num_ranks, -1).sum(1)),
        }


def make_routes(
    shape: ExpertShape, tokens: int, top_k: int, wanted: float, device: torch.device
) -> Routes:
    """``tokens`` of each rank choose ``top_k`` experts by popularities as ``make-trace`` has them.

    ``wanted`` is the imbalance that is to be expected.
    """
    experts = shape.num_logical_experts
    workload = Workload(
        num_tokens=1,
        num_layers=1,
        num_experts=experts,
        top_k=top_k,
        num_ranks=shape.num_ranks,
        imbalance=wanted,
    )
    return _drawn(shape, tokens, top_k, next(segments(workload)).weights[0], device)


def hot_rank_routes(
    shape: ExpertShape, tokens: int, top_k: int, wanted: float, device: torch.device
) -> Routes:
    """The same where the first rank's experts are all as popular as it takes, and the others even.

    ``wanted`` is less than the number of ranks.
    """
    low, high = 0.0, 30.0  # the logarithm of how much more popular
    for _ in range(40):
        weights = np.ones((1, shape.num_logical_experts))
        weights[:, : shape.num_masters] = np.exp(middle := (low + high) / 2)
        of_first = chances(weights, top_k)[0, : shape.num_masters].sum() * shape.num_ranks / top_k
        low, high = (middle, high) if of_first < wanted else (low, middle)
    return _drawn(shape, tokens, top_k, weights[0], device)


def _drawn(
    shape: ExpertShape,
    tokens: int,
    top_k: int,
    popularity: NDArray[np.float64],
    device: torch.device,
) -> Routes:
    """The first experts to ring of exponential clocks, drawn on the device."""
    experts = shape.num_logical_experts
    weights = torch.from_numpy(popularity).float().to(device)
    generator = torch.Generator(device).manual_seed(0)
    rings = torch.empty((tokens, experts), device=device)
    ids = [
        (rings.exponential_(generator=generator) / weights)
        .topk(top_k, dim=1, largest=False, sorted=False)
        .indices.int()
        for _ in range(shape.num_ranks)
    ]
    return Routes(shape, torch.stack(ids))
