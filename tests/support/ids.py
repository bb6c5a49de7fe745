"""Routing and plans of it, for the tests of kernels."""

from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR
from ultraep_kernels.host.reroute import physical_table

from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape, Plan


def count_reference(
    topk_ids: torch.Tensor, num_logical_experts: int
) -> tuple[NDArray[np.int64], int]:
    """Torch twin of ``count``."""
    ids = topk_ids.reshape(-1).long()
    valid = ids[(ids >= 0) & (ids < num_logical_experts)]
    unknown = int((ids != -1).sum()) - valid.numel()
    return torch.bincount(valid, minlength=num_logical_experts).numpy(), unknown


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


def edge_ids(shape: ExpertShape, skewed: torch.Tensor) -> dict[str, torch.Tensor]:
    """What any kernel of ids must take, by name."""
    return {
        "no tokens": torch.empty((0, 8), dtype=torch.int32),
        "only padding": torch.full((5, 3), -1, dtype=torch.int32),
        "one expert": torch.full((301, 1), shape.num_logical_experts - 1, dtype=torch.int32),
        "balanced": torch.arange(shape.num_logical_experts).repeat(2).view(-1, 1),  # int64
        "skewed": skewed,
        "not contiguous": skewed.t().contiguous().t()[::2],
    }


def plan_of(ids: torch.Tensor, shape: ExpertShape) -> Plan:
    """Of rank 0, the only one that has tokens."""
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), np.int64)
    loads[0] = count_reference(ids, shape.num_logical_experts)[0]
    return plan_quota(loads, PlanContext.of(shape), 0)


def random_slots(num_ranks: int, num_slots: int, num_masters: int, seed: int) -> NDArray[np.int32]:
    """Few experts of a few ranks in many slots, some slots empty, no expert where it lives."""
    rng = np.random.default_rng(seed)
    slot_expert = np.full((num_ranks, num_slots), -1, np.int32)
    for rank in range(num_ranks):
        others = [e for e in range(min(3, num_ranks) * num_masters) if e // num_masters != rank]
        held = rng.choice(others[: num_slots + 2], size=num_slots, replace=False)
        slot_expert[rank] = np.where(rng.random(num_slots) < 0.8, held, -1)
    return slot_expert


def reroute_reference(
    topk_ids: torch.Tensor,
    share: NDArray[np.int32],
    slot_expert: NDArray[np.int32],
    num_masters: int,
) -> torch.Tensor:
    """As ``reroute`` of kernels, whose list of places is written out here."""
    physical = physical_table(slot_expert, num_masters)
    out = torch.full(topk_ids.shape, -1, dtype=torch.int32)
    flat_ids, flat_out = topk_ids.reshape(-1), out.view(-1)
    for expert in range(share.shape[0]):
        positions = torch.nonzero(flat_ids == expert).squeeze(1)
        places = np.repeat(physical[expert], share[expert])
        if places.size < positions.numel():
            raise ValueError("share holds fewer assignments than topk_ids")
        if positions.numel():
            stride = max(1, places.size * GOLDEN_NUMERATOR // GOLDEN_DENOMINATOR)
            while gcd(stride, places.size) != 1:
                stride += 1
            order = np.arange(positions.numel()) * stride % places.size
            flat_out[positions] = torch.from_numpy(places[order])
    return out
