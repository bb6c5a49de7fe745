"""Proof where experts live on a GPU: stages one by one for the start, and samples.

Stages are the kernels that serve, compiled for what they are given here: loads that no exchange
brought, and plans that are followed whether they pay or not.

Samples are checked in stream order, and nobody waits for them. When the layer has been launched,
its ranks exchange twice more: what they tell of plan and copies, and what each has found. The
verdicts are copied to page-locked memory, and are read at a later call. Rank 0 then switches the
policy to off, which all ranks follow in the batch after.

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

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.device.checksum import checksums
from ultraep_kernels.device.count import Count
from ultraep_kernels.device.plan import DevicePlan, Given, Planner, Rows, Sender, plan_sizes
from ultraep_kernels.device.relays import has_relays
from ultraep_kernels.device.reroute import new_physical
from ultraep_kernels.device.status import new_status

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.backend import DeviceBackend
from ultraep_serve.balance.cuda.driver import host_words
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.timing import new_mark
from ultraep_serve.errors import ControlError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.proof.checks import Found
from ultraep_serve.proof.samples import Sample, Sampled, Samples
from ultraep_serve.proof.start import Stages
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import IntArray, Plan, VerificationCheck

logger = logging.getLogger(__name__)

_MOST_SENT = 8  # samples on their way to the host; further ones are not read
_PLANNED = len(VerificationCheck)  # column of a verdict, behind those of the checks


def stages_of(backend: DeviceBackend) -> Stages:
    """The stages of ranks that are connected; the host waits for each."""
    setup, layers, fabric = backend.setup, backend.layers, backend.fabric
    shape, relay, device = setup.shape, setup.relay, fabric.status.device
    may_relay = has_relays(relay, setup.location.domain_size)

    count = Count(shape.num_logical_experts, device)
    sizes = shape.num_ranks, shape.num_logical_experts, shape.num_replica_slots

    def counted(ids: torch.Tensor) -> NDArray[np.int64]:
        count.fit(ids)
        count(ids.to(device))
        load: NDArray[np.int64] = count.load.cpu().numpy().astype(np.int64)
        return load

    def route(
        loads: NDArray[np.int64], context: PlanContext, source: int, ids: torch.Tensor
    ) -> tuple[Plan, torch.Tensor]:
        on_device = ids.to(device)
        physical, status = new_physical(on_device), new_status(device)
        speeds = torch.from_numpy(context.speeds).to(device, torch.int32)
        rows = Rows.of(torch.from_numpy(loads).to(device, torch.int32))
        plan = Planner(
            plan_sizes(*sizes, context.domain_size),
            Given(rows, status, speeds=speeds),
            Sender(source, fabric.rank, relay, fabric.epoch),
        )
        counted(on_device)
        plan(on_device, physical, count)
        found = plan.found
        parts = found.slot_expert, found.slot_expert, found.quota, found.share
        return Plan(*(part.cpu().numpy() for part in parts)), physical.cpu()

    def replicate(layer: int, slot_expert: IntArray, by_relays: bool) -> None:
        slots = torch.from_numpy(slot_expert).to(device)
        nothing = torch.zeros(fabric.limits.row_width, dtype=torch.int32, device=device)
        fabric.exchange(nothing)  # nobody reads slots any more
        mode = "always" if by_relays and may_relay else "never"
        sends = fabric.sends(slots, shape.num_masters, mode)
        stream = fabric.stream(slots, shape.num_masters, sends)
        chunks = fabric.chunks(layers[layer])
        stream.send(chunks)
        stream.receive(chunks, fabric.patience_ns)
        fabric.require_peers()

    return Stages(fabric.rank, layers, fabric.gathered, counted, route, replicate, checksums)


@dataclass
class _Checked:
    """A sampled layer until its verdicts are read."""

    sample: Sample
    found: Found  # of which the plan is there until the micro-batch is routed again
    wrong_ids: torch.Tensor  # bool ()
    wrong_answers: torch.Tensor  # bool ()
    told: torch.Tensor  # (4 + R,), and
    held: torch.Tensor  # checksum () of its slots, of a layer that was launched
    marks: list[tuple[Any, Any]] = field(default_factory=list)  # around parts of the checks
    page: torch.Tensor | None = None  # verdicts (R, C + 1) int32 in host memory


class DeviceSamples(Samples):
    """Checks one layer of so many; all ranks make and call it alike."""

    def __init__(
        self,
        setup: GroupSetup,
        fabric: DeviceFabric,
        sampled: Sampled,
        recorder: Recorder,
        policies: ControlPage | None,
    ) -> None:
        """``policies`` is rank 0's, which switches off."""
        super().__init__(setup, sampled, recorder, checksums)
        self._fabric, self._policies = fabric, policies
        self._device = fabric.status.device
        self._routed: dict[int, _Checked] = {}  # by micro-batch; the layer is not launched yet
        self._untold: dict[int, _Checked] = {}
        self._sent: deque[_Checked] = deque()
        size = setup.shape.num_ranks, _PLANNED + 1
        pages = range(_MOST_SENT)
        self._pages = [host_words(size[0] * size[1], self._device).view(size) for _ in pages]
        none = torch.zeros(setup.shape.num_local, dtype=torch.int32, device=self._device)
        for layer in range(len(sampled.parameters)):  # the kernel is compiled
            checksums(self._tensors(layer), none)

    def routed(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        physical: torch.Tensor,
        plan: DevicePlan,
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
        decision = plan.decision.clone().view(())  # micro-batches share it
        found = Found(decision, plan.slot_expert, plan.quota, plan.share, plan.expert_load)
        nothing = torch.zeros((), dtype=torch.bool, device=self._device)
        checked = self._routed[micro_batch] = _Checked(
            sample, found, nothing, nothing, nothing, nothing
        )
        with self._timed(checked):
            ids = topk_ids.reshape(-1), physical.reshape(-1)
            checked.wrong_ids = self._checks.ids_are_wrong(*ids, found)

    def computed(self, micro_batch: int = 0) -> bool:
        """Check the layer that was launched; ranks exchange what they have found, maybe later.

        Whether one of them is now known to have found a mistake.
        """
        failed = self._look()
        checked = self._routed.pop(micro_batch, None)
        if checked is None:
            return failed
        layer, found = checked.sample.layer, checked.found
        tensors = self._tensors(layer)
        with self._timed(checked):
            checked.told = self._checks.told(tensors, found)
            checked.held = self._checks.sum_of_slots(tensors, found)
            if self._answers is not None and checked.sample.with_answers:
                checked.wrong_answers = self._answers.is_wrong(layer, found.slots)
        if self._setup.shape.num_micro_batches > 1:
            self._untold[micro_batch] = checked
        else:
            self._tell(checked)
        return failed

    def _tell(self, checked: _Checked) -> None:
        """Exchange what was found, and send everybody's verdicts to the host."""
        checked.page = self._pages.pop() if self._pages else None
        with self._timed(checked):
            verdicts = self._verdicts(checked)
            if checked.page is not None:
                checked.page.copy_(verdicts, non_blocking=True)
                self._sent.append(checked)

    def _verdicts(self, checked: _Checked) -> torch.Tensor:
        """All ranks' verdicts (R, C + 1) int32: whether each check failed, and a plan was there."""
        rows = self._fabric.exchange_all(checked.told.view(torch.int32)).view(torch.int64)
        is_planned = checked.found.is_planned
        failed = {
            VerificationCheck.ASSIGNMENTS: checked.wrong_ids,
            VerificationCheck.SLOTS: self._checks.expected(rows) != checked.held,
            VerificationCheck.PLANS: self._checks.plans_are_wrong(rows),
            VerificationCheck.ANSWERS: is_planned & checked.wrong_answers,
        }
        verdict = torch.stack([*(failed[check] for check in VerificationCheck), is_planned])
        return self._fabric.exchange_all(verdict.int())

    @contextmanager
    def _timed(self, checked: _Checked) -> Iterator[None]:
        """Mark what is launched inside as a part of the checks."""
        marks = new_mark(self._device), new_mark(self._device)
        marks[0].record()
        yield
        marks[1].record()
        checked.marks.append(marks)

    def _look(self) -> bool:
        """Read the verdicts that have arrived; whether a rank found something."""
        failed = False
        while self._sent and self._sent[0].marks[-1][1].query():
            failed |= self._read(self._sent.popleft())
        return failed

    def _read(self, checked: _Checked) -> bool:
        """Count what was checked, and have rank 0 switch off where a rank found something.

        Whether one did.
        """
        verdicts, sample = checked.page, checked.sample
        assert verdicts is not None, "what has no page is not sent"
        spent = round(sum(begin.elapsed_time(end) for begin, end in checked.marks) * 1e6)
        own = verdicts[self._fabric.rank].tolist()
        self._recorder.count_verified(VerificationCheck.ASSIGNMENTS, spent)
        if own[_PLANNED]:
            made = [VerificationCheck.SLOTS, VerificationCheck.PLANS]
            if self._answers is not None and sample.with_answers:
                made.append(VerificationCheck.ANSWERS)
            for check in made:
                self._recorder.count_verified(check, 0)
        for check in VerificationCheck:
            if own[check]:
                self._raise(check, sample.layer, verdicts=verdicts.tolist())
        self.is_in_doubt = False  # all ranks have this verdict
        failed = bool(verdicts[:, :_PLANNED].any())
        if self._policies is not None and failed:
            try:
                self._policies.switch_off_in_doubt()
            except ControlError as error:
                logger.error("ultraep: a sample failed, and the policy cannot be set: %s", error)
        self._pages.append(verdicts)
        return failed
