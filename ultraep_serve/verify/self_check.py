"""The self-check: before a server is ready, all ranks together prove that it answers right here.

kernels   counts, plans and ids of made-up loads: what every plan must hold, ids as their twin's,
          and the same on every rank
slots     experts are copied into every slot, directly and through a relay; bytes as their masters'
answers   the engine computes a batch from masters, then with every expert computed by a copy; a
          full check also has it compute its largest batch

Each rank checks its own part, and all ranks learn the results, so that they raise together. What
is changed are the contents of slots, which no batch relies on.
"""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import Plan
from ultraep_kernels.experts import expert_bytes
from ultraep_kernels.host.reroute import reroute_reference

from ultraep_serve.balance.backend import Answers, LayerSlots, Stages
from ultraep_serve.errors import SelfCheckError
from ultraep_serve.plan.checks import check_plan
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import CheckResult, IntArray
from ultraep_serve.verify import made_up
from ultraep_serve.verify.answers import bound_of, largest_difference

__all__ = ["run_self_check"]

_MOST_SOURCES = 8  # of a load, whose ids are compared with their twin's, which is slow
_POISON = 0xA5  # every byte of a slot before something is copied there


def run_self_check(
    context: PlanContext, stages: Stages, answers: Answers | None, *, full: bool = False
) -> list[CheckResult]:
    """Every check in order, all ranks together; ends with the first that fails anywhere.

    ``answers`` None: the engine cannot be asked. ``full`` takes all layers, not only the first and
    the last of each kind, and has the first of each kind compute the engine's largest batch.
    Raises SelfCheckError on all ranks where one of them has found something wrong.
    """
    results: list[CheckResult] = []
    check = _SelfCheck(context, stages, results)
    check.run("kernels", check.kernels)
    if context.shape.num_replica_slots and context.domain_size > 1:
        kinds = _layers_by_kind(stages.layers)
        first_and_last = {index for of_kind in kinds for index in (of_kind[0], of_kind[-1])}
        layers = range(len(stages.layers)) if full else sorted(first_and_last)
        check.run("slots", lambda: check.slots(layers))
        if answers is not None:
            large = {of_kind[0] for of_kind in kinds} if full else set()
            check.run("answers", lambda: check.answers(answers, layers, large))
    return results


class _Wrong(Exception):
    """Something is not as it must be."""


class _SelfCheck:
    """The checks, each a method that says what it has checked, and raises _Wrong."""

    def __init__(self, context: PlanContext, stages: Stages, results: list[CheckResult]) -> None:
        """``results`` are added to."""
        self._results = results
        self._context, self._shape, self._stages = context, context.shape, stages
        self._patterns = made_up.SlotPatterns(context)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Do one check, and learn how the others did. Raises SelfCheckError with all results."""
        start, problem, detail = time.perf_counter(), "", ""
        try:
            detail = check()
        except _Wrong as wrong:
            problem = str(wrong)
        failed = self._stages.gather(np.array([bool(problem)], np.int64))[:, 0]
        if failed.any():
            rank = self._stages.rank if problem else int(failed.argmax())
            detail = f"failed on rank {rank}: {problem or 'its own log says at what'}"
        self._results.append(CheckResult(name, time.perf_counter() - start, detail))
        if failed.any():
            raise SelfCheckError(f"the self-check of {name} {detail}", self._results)

    def kernels(self) -> str:
        """Plans hold what every plan must, ids are the twin's, and all ranks have the same."""
        digest, problem = blake2b(digest_size=7), ""
        try:
            for number in range(made_up.NUM_LOADS):
                for array in self._planned(number):
                    digest.update(array.tobytes())
        except _Wrong as wrong:
            problem = str(wrong)
        own = int.from_bytes(digest.digest(), "little")
        everybody = self._stages.gather(np.array([own], np.int64))[:, 0]
        _require(not problem, problem)
        _require(bool((everybody == own).all()), "ranks made other plans of the same loads")
        return f"{made_up.NUM_LOADS} loads"

    def _planned(self, number: int) -> list[NDArray[np.int32]]:
        """Slots, quotas and a few ranks' physical ids for a made-up load."""
        context, ids = made_up.random_load(self._context, number)
        stages, masters = self._stages, self._shape.num_masters
        experts = self._shape.num_logical_experts
        loads = np.stack([np.bincount(own[own >= 0], minlength=experts) for own in ids])
        for own, load in zip(ids, loads, strict=True):
            _require(np.array_equal(stages.count(own), load), "assignments are counted wrong")
        try:
            routed = [stages.route(loads, context, rank, own) for rank, own in enumerate(ids)]
            plans = [plan for plan, _ in routed]
            shares = np.stack([plan.share for plan in plans])
            check_plan(loads, context, plans[0].slot_expert, plans[0].quota, shares)
        except ValueError as broken:
            raise _Wrong(str(broken)) from broken
        made = [plans[0].slot_expert, plans[0].quota]
        is_same = all(_are_same(plan, plans[0]) for plan in plans)
        _require(is_same, "a rank's share is of another plan")
        for source in range(number, number + min(len(ids), _MOST_SOURCES)):
            own, (plan, physical) = ids[source % len(ids)], routed[source % len(ids)]
            twin = reroute_reference(own, plan.share, plan.slot_expert, masters)
            _require(torch.equal(physical, twin), "an assignment went to a wrong expert")
            made.append(physical.numpy())
        return made

    def slots(self, layers: Iterable[int]) -> str:
        """Every slot takes an expert directly, and in domains of three and more by a relay."""
        patterns = [(self._patterns.rotated(0), False)]
        if self._context.domain_size > 2:
            patterns.append((self._patterns.from_one_rank(), True))
        copies, problem = 0, ""
        for layer in layers:
            for slot_expert, by_relays in patterns:
                expected, filled = self._expected(layer, slot_expert), self._filled(slot_expert)
                self._empty(layer)
                unlike = self._checksums(layer) != expected
                self._stages.replicate(layer, slot_expert, by_relays)
                found = self._checksums(layer)
                self._stages.gather(np.zeros(1, np.int64))  # by then all others have looked too
                wrong = (found != expected) | (self._checksums(layer) != expected)
                wrong &= filled
                if (filled & ~unlike).any():
                    problem = "checksums do not tell an expert's bytes from others"
                if wrong.any() and not problem:
                    slot = int(wrong.argmax())
                    expert = slot_expert[self._stages.rank, slot]
                    problem = f"slot {slot} of layer {layer} has other bytes than expert {expert}"
                copies += int(filled.sum())
        _require(not problem, problem)
        return f"{copies} copies"

    def _filled(self, slot_expert: IntArray) -> NDArray[np.bool_]:
        filled: NDArray[np.bool_] = slot_expert[self._stages.rank] >= 0
        return filled

    def _expected(self, layer: int, slot_expert: IntArray) -> NDArray[np.int64]:
        """Checksums of this rank's slots (S,), as the masters' owners say."""
        masters, rank = self._shape.num_masters, self._stages.rank
        is_owned, local = slot_expert // masters == rank, slot_expert % masters
        wanted = np.zeros(self._shape.num_local, np.bool_)
        wanted[local[is_owned]] = True
        owned = np.where(is_owned, self._stages.checksums(layer, wanted)[local], 0)
        everybody = self._stages.gather(owned.reshape(-1)).reshape(-1, *slot_expert.shape)
        expected: NDArray[np.int64] = everybody.sum(axis=0)[rank]
        return expected

    def _empty(self, layer: int) -> None:
        """Fill this rank's slots with bytes that no expert has."""
        for tensor in self._stages.layers[layer].tensors:
            expert_bytes(tensor)[self._shape.num_masters :].fill_(_POISON)

    def _checksums(self, layer: int) -> NDArray[np.int64]:
        """Checksums (S,) of what this rank's slots hold."""
        is_slot = np.arange(self._shape.num_local) >= self._shape.num_masters
        return self._stages.checksums(layer, is_slot)[is_slot]

    def answers(self, answers: Answers, layers: Sequence[int], large: Container[int]) -> str:
        """With every expert of a layer computed by a copy its output is what it is without.

        Layers that are in ``large`` compute the largest batch too.
        """
        tokens = made_up.random_tokens(answers, self._shape.num_logical_experts)
        bound = bound_of(answers.dtype)
        worst, problem = 0.0, ""
        for layer in layers:
            for how, difference in self._differences(answers, layer, tokens, layer in large):
                worst = max(worst, difference)
                if not difference <= bound and not problem:  # also where it is no number
                    problem = (
                        f"layer {layer} computed {how} differs by {difference:.2g} of its "
                        f"largest value, {bound:.2g} are allowed in {answers.dtype}"
                    )
        _require(not problem, problem)
        return f"{len(layers)} layers, largest difference {worst:.1g}"

    def _differences(
        self, answers: Answers, layer: int, tokens: Sequence[torch.Tensor], is_large: bool
    ) -> Iterator[tuple[str, float]]:
        """How ``tokens`` are computed otherwise than by masters, and how far that is from them.

        The largest batch has the same tokens over and over: what is answered must not depend on
        how many there are.
        """
        x, weights, ids = tokens
        expected = answers.compute(layer, x, weights, self._patterns.ids(ids, None))
        for turn in range(self._patterns.num_turns):
            found = self._by_copies(answers, layer, turn, tokens)
            yield "by copies", float(largest_difference(found, expected))
        if is_large:
            most, few = answers.most_tokens, len(expected)
            many = [tensor.repeat(-(-most // few), 1)[:most] for tensor in tokens]
            parts = torch.split(self._by_copies(answers, layer, 0, many), few)
            apart = [largest_difference(part, expected[: len(part)]) for part in parts]
            yield f"by copies in a batch of {most} tokens", float(torch.stack(apart).max())

    def _by_copies(
        self, answers: Answers, layer: int, turn: int, tokens: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        x, weights, ids = tokens
        slot_expert = self._patterns.rotated(turn)
        self._stages.replicate(layer, slot_expert, False)
        return answers.compute(layer, x, weights, self._patterns.ids(ids, slot_expert))


def _layers_by_kind(layers: Sequence[LayerSlots]) -> list[list[int]]:
    """Layers, where experts of one kind have tensors of the same types and shapes."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        kind = tuple((tensor.dtype, tensor.shape) for tensor in layer.tensors)
        kinds.setdefault(kind, []).append(index)
    return list(kinds.values())


def _are_same(plan: Plan, other: Plan) -> bool:
    """Whether two ranks' plans agree in what all ranks have alike."""
    return np.array_equal(plan.slot_expert, other.slot_expert) and np.array_equal(
        plan.quota, other.quota
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Wrong(otherwise)
