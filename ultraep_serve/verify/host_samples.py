"""The checks of a sampled layer where experts live in host memory.

    begin          the load is what the ids say
    agree          one more exchange, before anything moves: all ranks have the same plan, which
                   holds what every plan must; owners tell the checksums of what is to be copied
    check_routed   each assignment goes once to a physical expert of its logical one, as often as
                   the plan says; slots hold the bytes of masters before the engine computes
    check_computed and still do afterwards; a few tokens get from copies what masters give them

All is read from where the engine reads it. A rank that finds something goes on like the others;
it says so in its row of the next exchange (``Doubt``).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.host.checksum import checksum, weighted_sum

from ultraep_serve.balance.backend import Answers, GroupSetup, Sampled
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.plan.checks import check_slots
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.copies import copies_of
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, Plan, TokenView, VerificationCheck
from ultraep_serve.verify.answers import bound_of, largest_difference, using_copies
from ultraep_serve.verify.samples import Doubt, Sample, SampleTurns

__all__ = ["HostSamples"]

_SHA_BYTES = 7  # of a plan's hash, which is a positive int64
_SEED = 20_001  # of the tokens whose answers are computed again


class HostSamples:
    """Checks one layer of so many; all ranks make and call it alike."""

    def __init__(
        self, setup: GroupSetup, fabric: HostFabric, sampled: Sampled, recorder: Recorder
    ) -> None:
        self._setup, self._shape, self._fabric = setup, setup.shape, fabric
        self._sampled, self._recorder = sampled, recorder
        self.doubt = Doubt(setup, sampled, recorder)
        self._turns = SampleTurns(setup.config.verify_every, len(sampled.parameters))
        self._sample: Sample | None = None  # of the layer that is routed
        self._plan: Plan | None = None  # that all ranks have agreed on
        self._expected = 0  # checksum of this rank's filled slots
        self._uncounted = 0  # nanoseconds of parts of checks

    def begin(self, layer: int, topk_ids: torch.Tensor, load: NDArray[np.int64]) -> bool:
        """Count the layer; whether ``load`` (E,) belongs to ``topk_ids`` (T, K), as far as known.

        Where it does not, the layer must not be balanced.
        """
        self._sample, self._plan = self._turns.next(layer), None
        if self._sample is None:
            return True
        with self._timed(VerificationCheck.ASSIGNMENTS, counts=False):
            ids = topk_ids.reshape(-1).numpy()
            valid = ids[(ids >= 0) & (ids < load.size)]
            wrong = np.bincount(valid, minlength=load.size) != load
            if wrong.any():
                expert = int(wrong.argmax())
                self._raise(VerificationCheck.ASSIGNMENTS, f"expert {expert} was counted wrong")
        return not wrong.any()

    def agree(
        self, decision: Decision, plan: Plan | None, loads: NDArray[np.int64], context: PlanContext
    ) -> bool:
        """Whether all ranks have the same, right ``plan`` for ``loads`` (R, E); exchanges."""
        if self._sample is None:
            return True
        with self._timed(VerificationCheck.PLANS):
            broken = "" if plan is None else self._broken_rule(plan, loads, context)
            rows = self._gather(self._row(decision, plan, broken))
            problem = self._disagreement(rows, plan) or broken
            if problem:
                seen = {} if plan is None else {"slot_expert": plan.slot_expert}
                hashes = [f"{value:x}" for value in rows[:, 0].tolist()]
                self._raise(VerificationCheck.PLANS, problem, loads=loads, hashes=hashes, **seen)
                return False
            with np.errstate(over="ignore"):
                self._expected = int(rows[:, 2:].sum(axis=0)[self._fabric.rank])
            self._plan = plan
        return True

    def check_routed(
        self, topk_ids: torch.Tensor, physical: torch.Tensor, decision: Decision
    ) -> None:
        """Check ids (T, K), and slots, of a layer that the engine is about to compute."""
        if self._sample is None or decision is Decision.FORCED:  # wrong on purpose
            return
        with self._timed(VerificationCheck.ASSIGNMENTS):
            problem = self._wrong_ids(topk_ids.reshape(-1).numpy(), physical.reshape(-1).numpy())
            if problem:
                self._raise(VerificationCheck.ASSIGNMENTS, problem)
        if self._plan is not None:
            with self._timed(VerificationCheck.SLOTS, counts=False):
                self._check_slots("before the layer was computed")

    def check_computed(self) -> None:
        """Check slots, and seldom answers, of the layer that the engine has computed."""
        sample, plan = self._sample, self._plan
        if sample is None or plan is None:
            return
        with self._timed(VerificationCheck.SLOTS):
            self._check_slots("after the layer was computed")
        answers = self._sampled.answers
        if answers is not None and sample.with_answers and (plan.slot_expert >= 0).any():
            with self._timed(VerificationCheck.ANSWERS):
                self._check_answers(answers, sample, plan)

    @contextmanager
    def _timed(self, check: VerificationCheck, *, counts: bool = True) -> Iterator[None]:
        """Count the time, and the check where it is the last part of it."""
        started = time.perf_counter_ns()
        yield
        elapsed = time.perf_counter_ns() - started
        if counts:
            self._recorder.count_verified(check, elapsed + self._uncounted)
            self._uncounted = 0
        else:
            self._uncounted += elapsed

    def cannot_reroute(self, layer: int) -> None:
        """The layer's plan has fewer places than this rank's tokens: it leaves them at home."""
        problem = "the plan has fewer places than assignments"
        self.doubt.raise_with(VerificationCheck.ASSIGNMENTS, layer, problem)

    def _raise(self, check: VerificationCheck, problem: str, **seen: object) -> None:
        assert self._sample is not None, "only sampled layers are checked"
        self.doubt.raise_with(check, self._sample.layer, problem, **seen)

    def _row(self, decision: Decision, plan: Plan | None, broken: str) -> NDArray[np.int64]:
        """Hash of the plan, sum of this source's share, and a checksum for each rank (R,)."""
        row = np.zeros(2 + self._shape.num_ranks, np.int64)
        content = blake2b(str(decision.value).encode(), digest_size=_SHA_BYTES)
        if plan is not None:
            content.update(plan.slot_expert.tobytes() + plan.quota.tobytes())
            row[1] = weighted_sum(plan.share)
            row[2:] = self._checksums_of_copied(plan)
        hashed = int.from_bytes(content.digest(), "little")
        row[0] = ~hashed if broken else hashed
        return row

    def _gather(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        width = self._fabric.row_width
        parts = [row[start : start + width] for start in range(0, row.size, width)]
        return np.concatenate([self._fabric.exchange(part) for part in parts], axis=1)

    def _disagreement(self, rows: NDArray[np.int64], plan: Plan | None) -> str:
        if (rows[:, 0] != rows[0, 0]).any():
            return "ranks made other plans"
        sources = rows[:1] if self._setup.view is TokenView.SHARED else rows
        with np.errstate(over="ignore"):
            shares = int(sources[:, 1].sum())
        if plan is not None and shares != weighted_sum(plan.quota):
            return "the shares of all ranks are not the plan's quotas"
        return ""

    def _broken_rule(self, plan: Plan, loads: NDArray[np.int64], context: PlanContext) -> str:
        """What this rank's part of the plan breaks, if anything."""
        try:
            check_slots(plan.slot_expert, context)
        except ValueError as error:
            return str(error)
        own, quota = loads[self._setup.source_rank], plan.quota
        if not np.array_equal(quota.sum(1, np.int64), loads.sum(0, np.int64)):
            return "quotas are not the loads"
        if (quota < 0).any() or (plan.share < 0).any():
            return "a quota or a share is negative"
        if (quota[copies_of(plan.slot_expert, self._shape) == 0] != 0).any():
            return "a rank computes an expert that it does not hold"
        if not np.array_equal(plan.share.sum(1, np.int64), own):
            return "shares are not the loads"
        if self._setup.view is TokenView.SHARED and not np.array_equal(plan.share, quota):
            return "the share of the only source is not the quota"
        return ""

    def _checksums_of_copied(self, plan: Plan) -> NDArray[np.int64]:
        """For each rank (R,) the sum over its slots of those experts whose master is here."""
        shape, rank = self._shape, self._fabric.rank
        sums = np.zeros(plan.slot_expert.shape, np.int64)
        known: dict[int, int] = {}
        for target, slot in np.argwhere(plan.slot_expert // shape.num_masters == rank).tolist():
            expert = int(plan.slot_expert[target, slot])
            if expert not in known:
                known[expert] = self._checksum(expert % shape.num_masters)
            sums[target, slot] = known[expert]
        return np.array([weighted_sum(of_target) for of_target in sums], np.int64)

    def _engine_tensors(self) -> list[torch.Tensor] | None:
        """What the engine reads the layer's experts from; None where it has none for each slot."""
        assert self._sample is not None, "only sampled layers are checked"
        tensors = [tensor.data for tensor in self._sampled.parameters[self._sample.layer]]
        is_whole = all(t.dim() > 0 and t.shape[0] == self._shape.num_local for t in tensors)
        return tensors if is_whole else None

    def _checksum(self, local: int) -> int:
        """Of a physical expert of this rank, as the engine reads it; 0 where it has none."""
        tensors = self._engine_tensors()
        return 0 if tensors is None else checksum(tensor[local] for tensor in tensors)

    def _check_slots(self, when: str) -> None:
        assert self._plan is not None, "only planned layers have copies"
        slot_expert = self._plan.slot_expert[self._fabric.rank]
        filled = np.zeros(slot_expert.size, np.int64)
        for slot in np.flatnonzero(slot_expert >= 0).tolist():
            filled[slot] = self._checksum(self._shape.num_masters + slot)
        problem = ""
        if self._engine_tensors() is None:
            problem = "the engine has other tensors of experts than those that were extended"
        elif weighted_sum(filled) != self._expected:
            problem = f"slots of this rank had other bytes than their masters {when}"
        if problem:
            self._raise(
                VerificationCheck.SLOTS,
                problem,
                slot_expert=slot_expert,
                checksums=[f"{value:x}" for value in filled.tolist()],
                expected_sum=f"{self._expected:x}",
            )

    def _wrong_ids(self, logical: NDArray[np.integer], physical: NDArray[np.integer]) -> str:
        """What is wrong with the physical ids of assignments, if anything."""
        shape, plan = self._shape, self._plan
        experts, masters = shape.num_logical_experts, shape.num_masters
        held = np.full((shape.num_ranks, shape.num_local), -1, np.int64)  # logical, by physical
        held[:, :masters] = np.arange(experts).reshape(-1, masters)
        places = np.zeros((shape.num_ranks, shape.num_local), np.int64)
        if plan is not None:
            held[:, masters:] = plan.slot_expert
            ranks = np.arange(shape.num_ranks)[:, None]
            places = np.where(held >= 0, plan.share[held, ranks], 0)
        there = np.where((logical >= 0) & (logical < experts), logical, -1)
        if (physical < -1).any() or (physical >= held.size).any():
            return "an assignment went to no expert"
        found = np.where(physical >= 0, held.reshape(-1)[physical], -1)
        if not np.array_equal(found, there):
            number = int((found != there).sum())
            return f"{number} assignments went to other experts, or were lost"
        computed = np.bincount(physical[physical >= 0], minlength=held.size)
        if plan is not None and not np.array_equal(computed, places.reshape(-1)):
            return "experts get other numbers of assignments than the plan has for them"
        if plan is None and computed.reshape(held.shape)[:, masters:].any():
            return "an assignment went to a slot without a plan"
        return ""

    def _check_answers(self, answers: Answers, sample: Sample, plan: Plan) -> None:
        """Compute a few tokens by copies and by masters; all ranks do it together."""
        shape = self._shape
        copied = np.unique(plan.slot_expert[plan.slot_expert >= 0])
        rest = np.setdiff1d(np.arange(shape.num_logical_experts), copied)
        experts_per_token = answers.experts_per_token
        num_tokens = -(-copied.size // experts_per_token)
        every = np.resize(np.concatenate([copied, rest]), num_tokens * experts_per_token)
        ids = torch.from_numpy(every).view(num_tokens, -1)
        random = torch.Generator().manual_seed(_SEED + answers.seed)
        x = torch.randn(num_tokens, answers.hidden_size, generator=random).to(answers.dtype)
        weights = torch.full(ids.shape, 1 / experts_per_token)
        outputs = [
            answers.compute(sample.layer, x, weights, using_copies(ids, slots, shape))
            for slots in (None, torch.from_numpy(plan.slot_expert))
        ]
        difference = float(largest_difference(outputs[1], outputs[0]))
        bound = bound_of(answers.dtype)
        if not difference <= bound:  # also where it is no number
            self._raise(
                VerificationCheck.ANSWERS,
                f"tokens computed by copies differ by {difference:.2g} of the largest value, "
                f"{bound:.2g} are allowed",
                slot_expert=plan.slot_expert,
            )
