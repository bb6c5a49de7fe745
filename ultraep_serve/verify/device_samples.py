"""The checks of a sampled layer on a device, in stream order; nobody waits for them.

When the layer has been launched, its ranks exchange twice more: a hash of the plan with checksums
of what was copied, and what each has found. The verdicts are copied to page-locked memory, and are
read at a later call, when they are there. Rank 0 then switches the policy to off, which all ranks
follow in the batch after. Layers of overlapping micro-batches, and those in CUDA graphs, are not
checked; neither are answers.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from ultraep_kernels.device.checksum import checksums
from ultraep_kernels.device.plan import DevicePlan

from ultraep_serve.balance.backend import GroupSetup, PolicySource, Sampled
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.memory import host_words
from ultraep_serve.balance.cuda.timing import new_mark
from ultraep_serve.errors import ControlError
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, TokenView, VerificationCheck
from ultraep_serve.verify.samples import Doubt, Sample, SampleTurns

__all__ = ["DeviceSamples"]

logger = logging.getLogger(__name__)

_MOST_SENT = 8  # samples on their way to the host; further ones are not read
_PROBLEMS = {
    VerificationCheck.ASSIGNMENTS: "an assignment went elsewhere than the plan says",
    VerificationCheck.SLOTS: "slots had other bytes than their masters after the layer",
    VerificationCheck.PLANS: "ranks made other plans, or quotas are not the loads",
}


@dataclass(frozen=True)
class _Sent:
    """A sample on its way to the host."""

    sample: Sample
    verdicts: torch.Tensor  # (R, 4) int32 in host memory: whether a check failed; planned
    marks: tuple[Any, Any]  # around the checks


class DeviceSamples:
    """Checks one layer of so many; all ranks make and call it alike."""

    def __init__(
        self,
        setup: GroupSetup,
        fabric: DeviceFabric,
        sampled: Sampled,
        policies: PolicySource | None,
        recorder: Recorder,
    ) -> None:
        self._setup, self._shape, self._fabric = setup, setup.shape, fabric
        self._sampled, self._policies, self._recorder = sampled, policies, recorder
        self._doubt = Doubt(setup, sampled, recorder)
        self._turns = SampleTurns(setup.config.verify_every, len(sampled.parameters))
        self._sample: Sample | None = None
        self._found: DevicePlan | None = None
        self._sent: deque[_Sent] = deque()
        self._device = fabric.status.device
        size = self._shape.num_ranks, 4
        pages = range(_MOST_SENT)
        self._pages = [host_words(size[0] * size[1], self._device).view(size) for _ in pages]

    def warm_up(self) -> None:
        """Compile the kernel, by checksums of no expert."""
        none = torch.zeros(self._shape.num_local, dtype=torch.int32, device=self._device)
        for parameters in self._sampled.parameters:
            checksums([parameter.data for parameter in parameters], none)

    def routed(
        self, layer: int, topk_ids: torch.Tensor, physical: torch.Tensor, found: DevicePlan
    ) -> None:
        """Count the layer, in which all ranks exchange; check ids (T, K) where it is sampled."""
        self._sample = None if self._shape.num_micro_batches > 1 else self._turns.next(layer)
        if self._sample is not None:
            self._start = new_mark(self._device)
            self._start.record()
            self._found = found
            self._wrong_ids = self._ids_are_wrong(topk_ids.reshape(-1), physical.reshape(-1), found)

    def computed(self) -> None:
        """Check the layer that was launched; all ranks exchange what they have found."""
        self._look()
        sample, found, self._sample = self._sample, self._found, None
        if sample is None or found is None:
            return
        planned = found.decision == Decision.PLANNED
        wrong_slots, wrong_plans = self._compare(sample, found)
        verdict = [self._wrong_ids, wrong_slots & planned, wrong_plans & planned, planned]
        row = self._fabric_row()
        row[:4] = torch.stack([part.reshape(()) for part in verdict]).int()
        everybodys = self._fabric.exchange(row)[:, :4]
        if self._pages:
            page = self._pages.pop()
            page.copy_(everybodys, non_blocking=True)
            done = new_mark(self._device)
            done.record()
            self._sent.append(_Sent(sample, page, (self._start, done)))

    def _look(self) -> None:
        """Read the verdicts that have arrived."""
        while self._sent and self._sent[0].marks[1].query():
            sent = self._sent.popleft()
            self._read(sent)
            self._pages.append(sent.verdicts)

    def _read(self, sent: _Sent) -> None:
        begin, end = sent.marks
        spent, rank = round(begin.elapsed_time(end) * 1e6), self._fabric.rank
        own = sent.verdicts[rank].tolist()
        self._recorder.count_verified(VerificationCheck.ASSIGNMENTS, spent)
        if own[3]:
            for check in (VerificationCheck.SLOTS, VerificationCheck.PLANS):
                self._recorder.count_verified(check, 0)
        for check, problem in _PROBLEMS.items():
            if own[check]:
                verdicts = sent.verdicts.numpy()
                self._doubt.raise_with(check, sent.sample.layer, problem, verdicts=verdicts)
        self._doubt.is_there = False  # all ranks have this verdict
        if self._policies is not None and sent.verdicts[:, :3].any():
            try:
                self._policies.switch_off_in_doubt()
            except ControlError as error:
                logger.error("ultraep: a sample failed, and the policy cannot be set: %s", error)

    def _fabric_row(self) -> torch.Tensor:
        width = self._fabric.limits.row_width
        return torch.zeros(width, dtype=torch.int32, device=self._device)

    def _ids_are_wrong(
        self, logical: torch.Tensor, physical: torch.Tensor, found: DevicePlan
    ) -> torch.Tensor:
        """Whether an assignment (N,) is lost, doubled, or at another expert; () bool."""
        shape = self._shape
        experts, masters, local = shape.num_logical_experts, shape.num_masters, shape.num_local
        planned = found.decision == Decision.PLANNED
        slots = torch.where(planned, found.slot_expert, -1).long()
        every = torch.arange(experts, device=self._device).view(-1, masters)
        held = torch.cat([every, slots], dim=1)  # (R, L + S) logical, by physical
        valid = (logical >= 0) & (logical < experts)
        there = (physical >= 0) & (physical < held.numel())
        inside = torch.where(there, physical, 0).long()
        at = torch.where(there, held.view(-1)[inside], -1)
        wrong = (at != torch.where(valid, logical, -1)).any() | (physical >= held.numel()).any()
        computed = torch.zeros(held.numel(), dtype=torch.int64, device=self._device)
        computed.index_add_(0, inside, there.long())
        ranks = torch.arange(shape.num_ranks, device=self._device)[:, None]
        places = torch.where(held >= 0, found.share.long()[held.clamp(min=0), ranks], 0)
        wrong = wrong | (planned & (computed.view(-1, local) != places).any())
        return wrong & (found.decision != Decision.FORCED)  # which is wrong on purpose

    def _compare(self, sample: Sample, found: DevicePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether slots of this rank have other bytes than masters, and plans differ; () bool."""
        shape, rank = self._shape, self._fabric.rank
        masters, slots = shape.num_masters, found.slot_expert.long()
        mine = slots // masters == rank  # (R, S) whose master is here
        local = torch.where(mine, slots % masters, 0)
        wanted = torch.zeros(shape.num_local, dtype=torch.int32, device=self._device)
        wanted.index_add_(0, local.view(-1), mine.view(-1).int())
        wanted[masters:] = (slots[rank] >= 0).int()
        parameters = self._sampled.parameters[sample.layer]
        tensors = [parameter.data for parameter in parameters]
        if any(tensor.shape[0] != shape.num_local for tensor in tensors):
            sums = torch.arange(shape.num_local, device=self._device)  # of nothing that is there
        else:
            sums = checksums(tensors, wanted)
        odd = 2 * torch.arange(slots.shape[1], device=self._device) + 1
        for_targets = torch.where(mine, sums[local] * odd, 0).sum(dim=1)  # (R,)
        own = torch.where(slots[rank] >= 0, sums[masters:] * odd, 0).sum()
        quota = _weighted(found.quota)
        words = [_weighted(found.slot_expert) * 31 + quota, _weighted(found.share), *for_targets]
        rows = self._exchange(torch.stack(words))
        sources = rows[:1] if self._setup.view is TokenView.SHARED else rows
        other = (rows[:, 0] != rows[0, 0]).any() | (sources[:, 1].sum() != quota)
        other = other | (found.quota.sum(dim=1) != found.expert_load).any()
        return rows[:, 2 + rank].sum() != own, other

    def _exchange(self, words: torch.Tensor) -> torch.Tensor:
        """All ranks' ``words`` (n,) int64, (R, n), in as many exchanges as rows are needed."""
        flat, width = words.view(torch.int32), self._fabric.limits.row_width
        parts = []
        for part in torch.split(flat, width):
            row = self._fabric_row()
            row[: part.numel()] = part
            parts.append(self._fabric.exchange(row)[:, : part.numel()])
        return torch.cat(parts, dim=1).contiguous().view(torch.int64)


def _weighted(values: torch.Tensor) -> torch.Tensor:
    """Sum, int64 modulo 2**64, of ``values`` times odd numbers of their places; ()."""
    flat = values.reshape(-1).long()
    return (flat * (2 * torch.arange(flat.numel(), device=flat.device) + 1)).sum()
