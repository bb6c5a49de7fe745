"""The checks of a sampled layer on a device, in stream order; nobody waits for them.

When the layer has been launched, its ranks exchange twice more: a hash of the plan with checksums
of what was copied, and what each has found. The verdicts are copied to page-locked memory, and are
read at a later call, when they are there. Rank 0 then switches the policy to off, which all ranks
follow in the batch after.

Ranks must exchange in the same order. They route overlapping micro-batches in one order, but may
not end them in one, so these exchange when the same micro-batch, or the next batch, is routed.
Layers in CUDA graphs are not checked: a replay asks nobody. Nor are answers of micro-batches that
overlap, since an engine cannot compute beside them.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from ultraep_serve.types import Decision, VerificationCheck
from ultraep_serve.verify.device_checks import AnswerCheck, Told, ids_are_wrong, told_of
from ultraep_serve.verify.samples import Doubt, Sample, SampleTurns

__all__ = ["DeviceSamples"]

logger = logging.getLogger(__name__)

_MOST_SENT = 8  # samples on their way to the host; further ones are not read
_PLANNED = len(VerificationCheck)  # column of a verdict, behind those of the checks
_PROBLEMS = {
    VerificationCheck.ASSIGNMENTS: "an assignment went elsewhere than the plan says",
    VerificationCheck.SLOTS: "slots had other bytes than their masters after the layer",
    VerificationCheck.PLANS: "ranks made other plans, or quotas are not the loads",
    VerificationCheck.ANSWERS: "tokens computed by copies differ from those of masters",
}


@dataclass
class _Checked:
    """A sampled layer until its ranks have told each other what they found."""

    sample: Sample
    found: DevicePlan  # until the micro-batch is routed again; its decision for good
    wrong_ids: torch.Tensor
    wrong_answers: torch.Tensor
    told: Told | None = None  # of a layer that was launched
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # around parts of the checks


@dataclass(frozen=True)
class _Sent:
    """A sample on its way to the host."""

    sample: Sample
    verdicts: torch.Tensor  # (R, C + 1) int32 in host memory: whether a check failed; planned
    marks: list[tuple[Any, Any]]
    has_answers: bool


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
        micro_batches = self._shape.num_micro_batches
        layers = len(sampled.parameters) * micro_batches
        self._turns = SampleTurns(setup.config.verify_every, layers)
        self._overlaps = micro_batches > 1
        self._answers: AnswerCheck | None = None
        if sampled.answers is not None and self._shape.num_slots and not self._overlaps:
            self._answers = AnswerCheck(self._shape, sampled.answers)
        self._routed: dict[int, _Checked] = {}  # by micro-batch; the layer is not launched yet
        self._untold: dict[int, _Checked] = {}
        self._sent: deque[_Sent] = deque()
        self._device = fabric.status.device
        size = self._shape.num_ranks, _PLANNED + 1
        pages = range(_MOST_SENT)
        self._pages = [host_words(size[0] * size[1], self._device).view(size) for _ in pages]

    def warm_up(self) -> None:
        """Compile the kernel, by checksums of no expert."""
        none = torch.zeros(self._shape.num_local, dtype=torch.int32, device=self._device)
        for parameters in self._sampled.parameters:
            checksums([parameter.data for parameter in parameters], none)

    def routed(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        physical: torch.Tensor,
        found: DevicePlan,
        micro_batch: int = 0,
        begins: bool = False,
    ) -> None:
        """Count the layer, in which all ranks exchange; check ids (T, K) where it is sampled.

        ``begins``: whether all earlier layers belong to batches before.
        """
        for number in sorted(self._untold) if begins else [micro_batch]:
            if number in self._untold:
                self._tell(self._untold.pop(number))
        sample = self._turns.next(layer)
        if sample is None:
            return
        found = found._replace(decision=found.decision.clone())  # micro-batches share it
        nothing = torch.zeros((), dtype=torch.bool, device=self._device)
        checked = self._routed[micro_batch] = _Checked(sample, found, nothing, nothing)
        with self._timed(checked):
            ids = topk_ids.reshape(-1), physical.reshape(-1)
            checked.wrong_ids = ids_are_wrong(self._shape, *ids, found)

    def computed(self, micro_batch: int = 0) -> None:
        """Check the layer that was launched; ranks exchange what they have found, maybe later."""
        self._look()
        checked = self._routed.pop(micro_batch, None)
        if checked is None:
            return
        sample, found = checked.sample, checked.found
        parameters = [parameter.data for parameter in self._sampled.parameters[sample.layer]]
        with self._timed(checked):
            checked.told = told_of(self._shape, self._fabric.rank, parameters, found)
            if self._answers is not None and sample.with_answers:
                checked.wrong_answers = self._answers.is_wrong(sample.layer, found)
        if self._overlaps:
            self._untold[micro_batch] = checked
        else:
            self._tell(checked)

    def _tell(self, checked: _Checked) -> None:
        """Exchange what was found, and send everybody's verdicts to the host."""
        page = self._pages.pop() if self._pages else None
        with self._timed(checked):
            verdicts = self._verdicts(checked)
            if page is not None:
                page.copy_(verdicts, non_blocking=True)
        if page is not None:
            has_answers = self._answers is not None and checked.sample.with_answers
            self._sent.append(_Sent(checked.sample, page, checked.marks, has_answers))

    def _verdicts(self, checked: _Checked) -> torch.Tensor:
        """All ranks' verdicts (R, C + 1) int32."""
        told, planned = checked.told, (checked.found.decision == Decision.PLANNED).view(())
        assert told is not None, "only layers that were launched are told of"
        rows = self._exchange(told.words)
        failed = {
            VerificationCheck.ASSIGNMENTS: checked.wrong_ids,
            VerificationCheck.SLOTS: planned & told.wrong_slots(rows, self._fabric.rank),
            VerificationCheck.PLANS: planned & told.wrong_plans(rows, self._setup.view),
            VerificationCheck.ANSWERS: planned & checked.wrong_answers,
        }
        verdict = [*(failed[check] for check in VerificationCheck), planned]
        row = self._fabric_row()
        row[: len(verdict)] = torch.stack(verdict).int()
        return self._fabric.exchange(row)[:, : len(verdict)]

    @contextmanager
    def _timed(self, checked: _Checked) -> Iterator[None]:
        """Mark what is launched inside as a part of the checks."""
        marks = new_mark(self._device), new_mark(self._device)
        marks[0].record()
        yield
        marks[1].record()
        checked.marks.append(marks)

    def _look(self) -> None:
        """Read the verdicts that have arrived."""
        while self._sent and self._sent[0].marks[-1][1].query():
            sent = self._sent.popleft()
            self._read(sent)
            self._pages.append(sent.verdicts)

    def _read(self, sent: _Sent) -> None:
        spent = round(sum(begin.elapsed_time(end) for begin, end in sent.marks) * 1e6)
        own = sent.verdicts[self._fabric.rank].tolist()
        self._recorder.count_verified(VerificationCheck.ASSIGNMENTS, spent)
        if own[_PLANNED]:
            for check in (VerificationCheck.SLOTS, VerificationCheck.PLANS):
                self._recorder.count_verified(check, 0)
            if sent.has_answers:
                self._recorder.count_verified(VerificationCheck.ANSWERS, 0)
        for check, problem in _PROBLEMS.items():
            if own[check]:
                verdicts = sent.verdicts.numpy()
                self._doubt.raise_with(check, sent.sample.layer, problem, verdicts=verdicts)
        self._doubt.is_there = False  # all ranks have this verdict
        if self._policies is not None and sent.verdicts[:, :_PLANNED].any():
            try:
                self._policies.switch_off_in_doubt()
            except ControlError as error:
                logger.error("ultraep: a sample failed, and the policy cannot be set: %s", error)

    def _fabric_row(self) -> torch.Tensor:
        width = self._fabric.limits.row_width
        return torch.zeros(width, dtype=torch.int32, device=self._device)

    def _exchange(self, words: torch.Tensor) -> torch.Tensor:
        """All ranks' ``words`` (n,) int64, (R, n), in as many exchanges as rows are needed."""
        flat, width = words.view(torch.int32), self._fabric.limits.row_width
        parts = []
        for part in torch.split(flat, width):
            row = self._fabric_row()
            row[: part.numel()] = part
            parts.append(self._fabric.exchange(row)[:, : part.numel()])
        return torch.cat(parts, dim=1).contiguous().view(torch.int64)
