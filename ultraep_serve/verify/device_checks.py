"""What is wrong with a sampled layer, as tensors: checks that a device makes in stream order.

Shapes: R ranks, E logical experts, L masters and S replica slots of a rank, N assignments. Results
that say whether something is wrong are bool ().
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ultraep_kernels.device.checksum import checksums
from ultraep_kernels.device.plan import DevicePlan

from ultraep_serve.balance.backend import Answers
from ultraep_serve.types import Decision, ExpertShape, TokenView
from ultraep_serve.verify.answers import bound_of, largest_difference, using_copies

__all__ = ["AnswerCheck", "Told", "ids_are_wrong", "told_of"]

_SEED = 20_001  # of the tokens whose answers are computed again


def ids_are_wrong(
    shape: ExpertShape, logical: torch.Tensor, physical: torch.Tensor, found: DevicePlan
) -> torch.Tensor:
    """Whether an assignment (N,) is lost, doubled, or at another expert."""
    experts, masters, device = shape.num_logical_experts, shape.num_masters, physical.device
    planned = found.decision == Decision.PLANNED
    every = torch.arange(experts, device=device).view(-1, masters)
    held = torch.cat([every, _slots_of(found).long()], dim=1)  # (R, L + S) logical, by physical
    valid = (logical >= 0) & (logical < experts)
    there = (physical >= 0) & (physical < held.numel())
    inside = torch.where(there, physical, 0).long()
    at = torch.where(there, held.view(-1)[inside], -1)
    wrong = (at != torch.where(valid, logical, -1)).any() | (physical >= held.numel()).any()
    computed = torch.zeros(held.numel(), dtype=torch.int64, device=device)
    computed.index_add_(0, inside, there.long())
    ranks = torch.arange(shape.num_ranks, device=device)[:, None]
    places = torch.where(held >= 0, found.share.long()[held.clamp(min=0), ranks], 0)
    wrong = wrong | (planned & (computed.view(-1, shape.num_local) != places).any())
    return (wrong & (found.decision != Decision.FORCED)).view(())  # which is wrong on purpose


@dataclass(frozen=True)
class Told:
    """What a rank tells the others of a sampled layer, and what it compares theirs with."""

    # (2 + R,) int64: hashes of the plan and of this rank's share; for each rank the checksums of
    # what its slots should hold, added up, of those experts whose master is here
    words: torch.Tensor
    own: torch.Tensor  # () int64: that sum over the own slots, of what they hold
    quota: torch.Tensor  # () int64: hash of the quota, which is the sum of all shares' hashes
    is_broken: torch.Tensor  # whether quotas are not the loads

    def wrong_slots(self, rows: torch.Tensor, rank: int) -> torch.Tensor:
        """Whether slots have other bytes than masters, from all ranks' words (R, 2 + R)."""
        return rows[:, 2 + rank].sum() != self.own

    def wrong_plans(self, rows: torch.Tensor, view: TokenView) -> torch.Tensor:
        """Whether ranks have other plans, or shares that are not their quotas."""
        sources = rows[:1] if view is TokenView.SHARED else rows
        shares_differ = sources[:, 1].sum() != self.quota
        return (rows[:, 0] != rows[0, 0]).any() | shares_differ | self.is_broken


def told_of(
    shape: ExpertShape, rank: int, tensors: Sequence[torch.Tensor], found: DevicePlan
) -> Told:
    """Look at the experts that the engine computes the layer with, ``tensors`` (L + S, ...)."""
    masters, slots, device = shape.num_masters, found.slot_expert.long(), found.quota.device
    mine = slots // masters == rank  # (R, S) whose master is here
    local = torch.where(mine, slots % masters, 0)
    wanted = torch.zeros(shape.num_local, dtype=torch.int32, device=device)
    wanted.index_add_(0, local.view(-1), mine.view(-1).int())
    wanted[masters:] = (slots[rank] >= 0).int()
    if any(tensor.shape[:1] != (shape.num_local,) for tensor in tensors):
        sums = torch.arange(shape.num_local, device=device)  # of nothing that is there
    else:
        sums = checksums(tensors, wanted)
    odd = 2 * torch.arange(slots.shape[1], device=device) + 1
    for_targets = torch.where(mine, sums[local] * odd, 0).sum(dim=1)  # (R,)
    own = torch.where(slots[rank] >= 0, sums[masters:] * odd, 0).sum()
    quota = _weighted(found.quota)
    plan = _weighted(found.slot_expert) * 31 + quota
    words = torch.stack([plan, _weighted(found.share), *for_targets])
    return Told(words, own, quota, (found.quota.sum(dim=1) != found.expert_load).any())


class AnswerCheck:
    """A few tokens that the engine computes by masters, and again by copies."""

    def __init__(self, shape: ExpertShape, answers: Answers) -> None:
        self._shape, self._answers = shape, answers
        random = torch.Generator().manual_seed(_SEED + answers.seed)
        copies = min(shape.num_logical_experts, shape.num_ranks * shape.num_slots)
        size = -(-copies // answers.experts_per_token), answers.experts_per_token
        x = torch.randn(size[0], answers.hidden_size, generator=random)
        self._x = x.to(answers.device, answers.dtype)
        self._weights = torch.full(size, 1 / size[1], device=answers.device)
        self._turns = torch.arange(size[0] * size[1], device=answers.device).view(size)

    def is_wrong(self, layer: int, found: DevicePlan) -> torch.Tensor:
        """Whether answers differ by more than they may; all ranks compute them together."""
        shape, slots = self._shape, _slots_of(found)
        order = _copied_first(slots, shape.num_logical_experts)
        ids = order[self._turns % order.numel()]
        outputs = [
            self._answers.compute(layer, self._x, self._weights, using_copies(ids, held, shape))
            for held in (None, slots)
        ]
        difference = largest_difference(outputs[1], outputs[0])
        return ~(difference <= bound_of(self._answers.dtype))  # also where it is no number


def _copied_first(slots: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Experts (E,) int64, those that ``slots`` (R, S) hold in front."""
    is_copied = torch.zeros(num_experts + 1, dtype=torch.int32, device=slots.device)
    is_copied[torch.where(slots >= 0, slots.long(), num_experts)] = 1
    return is_copied[:-1].argsort(descending=True, stable=True)


def _slots_of(found: DevicePlan) -> torch.Tensor:
    """What slots (R, S) hold, -1 in all of them where the plan is not followed."""
    return torch.where(found.decision == Decision.PLANNED, found.slot_expert, -1)


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """Sum, int64 modulo 2**64, of ``values`` times odd numbers of their places; ()."""
    flat = values.reshape(-1).long()
    return (flat * (2 * torch.arange(flat.numel(), device=flat.device) + 1)).sum()
