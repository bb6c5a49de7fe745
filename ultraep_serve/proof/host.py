"""Proof where experts live in host memory: stages one by one for the start, and samples.

    agree           before anything moves: all ranks have the same plan, which is right; owners tell
                    the checksums of what is to be copied
    check_routed    before the engine computes: each assignment goes once to a physical expert of
                    its logical one, as often as the plan says; slots hold the bytes of masters
    check_computed  slots still do; seldom, a few tokens get from copies what masters give them

All is read from where the engine reads it. A rank that finds something goes on like the others; it
says so in its row of the next exchange.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.host.checksum import checksums
from ultraep_kernels.host.count import count
from ultraep_kernels.host.relays import relay_parents
from ultraep_kernels.host.reroute import reroute

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.host.backend import HostBackend
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.proof.checks import Found
from ultraep_serve.proof.samples import Sample, Sampled, Samples
from ultraep_serve.proof.start import Stages
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, IntArray, Plan, VerificationCheck


def stages_of(backend: HostBackend) -> Stages:
    """The stages of ranks that are connected."""
    fabric, layers = backend.fabric, backend.layers
    shape, masters = backend.setup.shape, backend.setup.shape.num_masters

    def route(
        loads: NDArray[np.int64], context: PlanContext, source: int, ids: torch.Tensor
    ) -> tuple[Plan, torch.Tensor]:
        plan = plan_quota(loads, context, source)
        return plan, reroute(ids, plan.share, plan.slot_expert, masters)

    def replicate(layer: int, slot_expert: IntArray, by_relays: bool) -> None:
        mode = "always" if by_relays else "never"
        parents = relay_parents(slot_expert, masters, mode, shape.num_ranks)
        fabric.exchange(np.zeros(1, np.int64))  # nobody reads slots any more
        fabric.stream(layers[layer], slot_expert, parents, masters)
        fabric.wait_slots(layers[layer], slot_expert)

    return Stages(
        rank=fabric.rank,
        layers=layers,
        gather=fabric.gathered,
        count=lambda ids: count(ids, shape.num_logical_experts)[0],
        route=route,
        replicate=replicate,
        checksums=checksums,
    )


class HostSamples(Samples):
    """Checks one layer of so many; all ranks make and call it alike."""

    def __init__(
        self,
        setup: GroupSetup,
        fabric: HostFabric,
        sampled: Sampled,
        recorder: Recorder,
        _policies: ControlPage | None,  # which the balancer itself switches off in doubt
    ) -> None:
        super().__init__(setup, sampled, recorder, checksums)
        self._fabric = fabric
        self._sample: Sample | None = None  # of the layer that is routed
        self._found: Found | None = None  # that all ranks have agreed on
        self._expected = 0  # checksum of this rank's filled slots
        checksums([tensor[:1] for tensor in sampled.parameters[0]], torch.ones(1))  # compiled

    def agree(
        self, layer: int, decision: Decision, plan: Plan | None, loads: NDArray[np.int64]
    ) -> bool:
        """Whether all ranks have the same, right ``plan`` for ``loads`` (R, E); exchanges.

        Called for every layer in which ranks exchange loads, and counts it.
        """
        self._sample = self._turns.next(layer)
        if self._sample is None:
            return True
        with self._timed(VerificationCheck.PLANS):
            self._found = found = _found(self._setup, decision, plan, loads)
            told = self._checks.told(self._tensors(layer), found)
            rows = torch.from_numpy(self._fabric.gathered(told.numpy()))
            self._expected = int(self._checks.expected(rows))
            is_wrong = bool(self._checks.plans_are_wrong(rows))
            if is_wrong:
                slots = found.slot_expert.tolist()
                self._raise(VerificationCheck.PLANS, layer, loads=loads.tolist(), slot_expert=slots)
                self._sample = None
        return not is_wrong

    def check_routed(
        self, topk_ids: torch.Tensor, physical: torch.Tensor, load: NDArray[np.int64]
    ) -> None:
        """Check ids (T, K), of which ``load`` (E,) were counted, and slots, before the engine."""
        if self._sample is None or self._found is None:
            return
        with self._timed(VerificationCheck.ASSIGNMENTS):
            logical = topk_ids.reshape(-1)
            valid = logical[(logical >= 0) & (logical < load.size)]
            is_wrong = bool((torch.bincount(valid, minlength=load.size).numpy() != load).any())
            ids = logical, physical.reshape(-1)
            if is_wrong or self._checks.ids_are_wrong(*ids, self._found):
                self._raise(VerificationCheck.ASSIGNMENTS, self._sample.layer)
            self._check_slots(self._sample, self._found)

    def check_computed(self) -> None:
        """Check slots, and seldom answers, of the layer that the engine has computed."""
        sample, found = self._sample, self._found
        if sample is None or found is None or not found.is_planned:
            return
        with self._timed(VerificationCheck.SLOTS):
            self._check_slots(sample, found)
        if self._answers is not None and sample.with_answers and (found.slots >= 0).any():
            with self._timed(VerificationCheck.ANSWERS):
                is_wrong = self._answers.is_wrong(sample.layer, found.slots)
                if is_wrong:
                    self._raise(VerificationCheck.ANSWERS, sample.layer)

    def cannot_reroute(self, layer: int) -> None:
        """The layer's plan has fewer places than this rank's tokens, which stay at home."""
        self._raise(VerificationCheck.ASSIGNMENTS, layer)

    def _check_slots(self, sample: Sample, found: Found) -> None:
        held = int(self._checks.sum_of_slots(self._tensors(sample.layer), found))
        if held != self._expected:
            slots = found.slot_expert.tolist()
            self._raise(VerificationCheck.SLOTS, sample.layer, slot_expert=slots)

    @contextmanager
    def _timed(self, check: VerificationCheck) -> Iterator[None]:
        started = time.perf_counter_ns()
        yield
        self._recorder.count_verified(check, time.perf_counter_ns() - started)


def _found(
    setup: GroupSetup, decision: Decision, plan: Plan | None, loads: NDArray[np.int64]
) -> Found:
    ranks, experts = loads.shape
    if plan is None:
        empty = np.zeros((experts, ranks), np.int32)
        none = np.full((ranks, setup.shape.num_slots), -1, np.int32)
        plan = Plan(none, none, empty, empty)
    parts = (plan.slot_expert, plan.quota, plan.share, loads.sum(axis=0))
    return Found(torch.tensor(decision.value), *map(torch.from_numpy, parts))
