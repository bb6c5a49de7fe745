"""What is wrong with a sampled layer, in tensors where experts live; a GPU's in its stream.

Shapes: R ranks, E logical experts, L masters and S replica slots of a rank, N assignments. Results
that say whether something is wrong are bool ().
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ultraep_serve.types import Decision, ExpertShape, TokenView

# tensors (N, ...), which of N experts are wanted: int32 -> their checksums (N,) int64
Checksums: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Found:
    """What was decided for a layer; all else counts where that is to follow a plan."""

    decision: torch.Tensor  # () int32
    slot_expert: torch.Tensor  # (R, S) int32
    quota: torch.Tensor  # (E, R) int32
    share: torch.Tensor  # (E, R) int32, of this rank's source
    expert_load: torch.Tensor  # (E,)

    @property
    def is_planned(self) -> torch.Tensor:
        """Whether a plan is followed; bool ()."""
        return self.decision == Decision.PLANNED

    @property
    def slots(self) -> torch.Tensor:
        """What slots (R, S) int64 hold; -1 in all of them where no plan is followed."""
        return torch.where(self.is_planned, self.slot_expert, -1).long()


@dataclass(frozen=True)
class LayerChecks:
    shape: ExpertShape
    rank: int
    view: TokenView
    checksums: Checksums

    def ids_are_wrong(
        self, logical: torch.Tensor, physical: torch.Tensor, found: Found
    ) -> torch.Tensor:
        """Whether an assignment (N,) is lost, doubled, or at another expert."""
        shape, device = self.shape, physical.device
        every = torch.arange(shape.num_logical_experts, device=device)
        held = torch.cat([every.view(-1, shape.num_masters), found.slots], dim=1)  # by physical
        valid = (logical >= 0) & (logical < every.numel())
        there = (physical >= 0) & (physical < held.numel())
        inside = torch.where(there, physical, 0).long()
        at = torch.where(there, held.view(-1)[inside], -1)
        wrong = (at != torch.where(valid, logical, -1)).any() | (physical >= held.numel()).any()
        computed = torch.zeros(held.numel(), dtype=torch.int64, device=device)
        computed.index_add_(0, inside, there.long())
        ranks = torch.arange(shape.num_ranks, device=device)[:, None]
        places = torch.where(held >= 0, found.share.long()[held.clamp(min=0), ranks], 0)
        wrong |= found.is_planned & (computed.view(held.shape) != places).any()
        return wrong & (found.decision != Decision.FORCED)  # which is wrong on purpose

    def told(self, tensors: Sequence[torch.Tensor], found: Found) -> torch.Tensor:
        """What a rank tells the others, (4 + R,) int64.

        Hashes of slots, quota and share; whether quotas are not the loads; and for each rank the
        checksums, added up, that its copies of experts whose master is here should have.
        ``tensors`` (L + S, ...) are those that the engine computes the layer with.
        """
        slots, masters = found.slots, self.shape.num_masters
        mine = slots // masters == self.rank
        local = torch.where(mine, slots % masters, 0)
        wanted = torch.zeros(self.shape.num_local, dtype=torch.int32, device=slots.device)
        wanted.index_add_(0, local.view(-1), mine.view(-1).int())
        sums = self._sums(tensors, wanted)[local]
        for_ranks = torch.where(mine, sums * _odd(slots), 0).sum(dim=1)
        is_broken = (found.quota.sum(dim=1) != found.expert_load).any()
        plan = [_weighted(found.quota), _weighted(found.share), is_broken.long()]
        plan = [torch.where(found.is_planned, value, 0) for value in plan]
        return torch.stack([_weighted(slots) + found.decision, *plan, *for_ranks])

    def sum_of_slots(self, tensors: Sequence[torch.Tensor], found: Found) -> torch.Tensor:
        """The checksums () int64 of what this rank's slots hold, added up as owners tell them."""
        slots = found.slots[self.rank]
        wanted = torch.zeros(self.shape.num_local, dtype=torch.int32, device=slots.device)
        wanted[self.shape.num_masters :] = (slots >= 0).int()
        sums = self._sums(tensors, wanted)[self.shape.num_masters :]
        return torch.where(slots >= 0, sums * _odd(slots), 0).sum()

    def plans_are_wrong(self, rows: torch.Tensor) -> torch.Tensor:
        """Whether ranks, which told ``rows`` (R, 4 + R), have other plans, or shares that are not
        their quotas, or quotas that are not the loads.
        """
        quota, shares = rows[0, 1], rows[:, 2]
        if self.view is TokenView.OWN:
            shares = shares.sum(dim=0, keepdim=True)  # as hashes add up; else each has it all
        differ = (rows[:, :2] != rows[0, :2]).any() | (shares != quota).any()
        return differ | (rows[:, 3] != 0).any()

    def expected(self, rows: torch.Tensor) -> torch.Tensor:
        """What ``sum_of_slots`` of this rank should be, by what ranks told, ``rows`` (R, 4 + R)."""
        return rows[:, 4 + self.rank].sum()

    def _sums(self, tensors: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
        """Checksums (L + S,); other numbers where tensors replaced those that were extended."""
        if any(tensor.shape[:1] != wanted.shape for tensor in tensors):
            return torch.arange(wanted.numel(), device=wanted.device)
        return self.checksums(tensors, wanted)


def _odd(slots: torch.Tensor) -> torch.Tensor:
    return 2 * torch.arange(slots.shape[-1], device=slots.device) + 1


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """Sum, int64 modulo 2**64, of ``values`` times odd numbers of their places; ()."""
    flat = values.reshape(-1).long()
    return (flat * _odd(flat)).sum()
