"""The self-check: before a server is ready, all ranks together prove that it answers right here.

kernels   counts, plans and ids of made-up loads are those of twins on the host, and plans hold what
          every plan must
copies    experts are copied into slots, directly and through relays, until each was in one; bytes
          are their masters', and the engine computes with copies what it computes with masters

Each rank checks its own part, and all ranks learn the results, so that they raise together. What
is changed are the contents of slots, which no batch relies on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED, Plan
from ultraep_kernels.experts import expert_bytes
from ultraep_kernels.host.reroute import reroute

from ultraep_serve.balance.slots import LayerSlots
from ultraep_serve.errors import SERVE_UNBALANCED, SelfCheckError
from ultraep_serve.plan.checks import check_plan
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.proof.answers import AnswerCheck, Answers, largest_difference
from ultraep_serve.proof.checks import Checksums, Found, LayerChecks
from ultraep_serve.types import CheckResult, Decision, IntArray, TokenView

_LOADS = 32
_TOKENS = 256  # of a rank
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TEXT_BYTES = 512  # of a reason that all ranks get; a multiple of 8
_PLANNED = torch.tensor(Decision.PLANNED.value)
_POISON = 0xA5  # every byte of a slot before something is copied there


@dataclass(frozen=True)
class Stages:
    """The stages of a batch one by one, as they run on this machine; all ranks call them alike.

    Shapes: R ranks, E logical experts, L masters and S replica slots of a rank, T tokens, K experts
    per token. Arrays and ids are on the host.
    """

    rank: int
    layers: Sequence[LayerSlots]
    gather: Callable[[NDArray[np.int64]], NDArray[np.int64]]  # (n,) of a rank -> (R, n)
    count: Callable[[torch.Tensor], NDArray[np.int64]]  # ids (T, K) int32 -> load (E,)
    # loads (R, E), context, source, its ids (T, K) int32 -> plan, physical ids (T, K) int32. Raises
    # ValueError where ids and plan do not belong together.
    route: Callable[[NDArray[np.int64], PlanContext, int, torch.Tensor], tuple[Plan, torch.Tensor]]
    # layer, slot_expert (R, S), whether by relays if plans may have any here; returns when they are
    # filled
    replicate: Callable[[int, IntArray, bool], None]
    checksums: Checksums  # of experts where they live


def run_self_check(
    context: PlanContext, stages: Stages, answers: Answers | None, *, full: bool = False
) -> list[CheckResult]:
    """Every check in order, all ranks together; ends with the first that fails anywhere.

    ``answers`` None: the engine cannot be asked. ``full`` takes all layers, not only the first and
    the last of each kind. Raises SelfCheckError on all ranks where one has found something wrong.
    """
    check = _SelfCheck(context, stages, answers)
    check.run("kernels", check.kernels)
    if context.shape.num_replica_slots and context.domain_size > 1:
        layers = range(len(stages.layers)) if full else _first_and_last(stages.layers)
        check.run("copies", lambda: check.copies(layers))
    return check.results


class _Wrong(Exception):
    """Something is not as it must be; ``otherwise`` is a remedy beside its own, see the error."""

    def __init__(self, problem: str, otherwise: str = SERVE_UNBALANCED) -> None:
        super().__init__(problem)
        self.otherwise = otherwise


class _SelfCheck:
    """The checks, each a method that says what it has checked, and raises _Wrong."""

    def __init__(self, context: PlanContext, stages: Stages, answers: Answers | None) -> None:
        self.results: list[CheckResult] = []
        self._context, self._shape, self._stages = context, context.shape, stages
        self._checks = LayerChecks(self._shape, stages.rank, TokenView.OWN, stages.checksums)
        experts = self._shape.num_logical_experts
        self._answers = None if answers is None else AnswerCheck(self._shape, answers, experts)
        self._warning = ""

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Do one check, and learn how the others did. Raises SelfCheckError with all results."""
        start, detail, own, otherwise = time.perf_counter(), "", "", ""
        try:
            detail = check()
        except _Wrong as wrong:
            own = f"{wrong}\n{wrong.otherwise}"
        told = {rank: text for rank, text in enumerate(self._told(own)) if text}
        problem = (self._stages.rank, own) if own else next(iter(told.items()), None)
        if problem is not None:
            reason, _, otherwise = problem[1].partition("\n")
            detail = f"failed on rank {problem[0]}: {reason}"
        seconds = time.perf_counter() - start
        self.results.append(CheckResult(name, seconds, detail, self._warning))
        if problem is not None:
            said = f"the self-check of {name} {detail}"
            raise SelfCheckError(said, self.results, otherwise=otherwise)

    def _told(self, text: str) -> list[str]:
        """All ranks' ``text``, of which the first bytes travel."""
        row = np.zeros(_TEXT_BYTES, np.uint8)
        content = text.encode("ascii", "replace")[:_TEXT_BYTES]
        row[: len(content)] = np.frombuffer(content, np.uint8)
        rows = self._stages.gather(row.view(np.int64))
        return [each.tobytes().rstrip(b"\0").decode("ascii") for each in rows]

    def kernels(self) -> str:
        """Loads, plans and ids are those of twins on the host; plans hold what every one must."""
        rank, shape = self._stages.rank, self._shape
        for number in range(_LOADS):
            context, ids = _made_up_load(self._context, number)
            experts = shape.num_logical_experts
            loads = np.stack([np.bincount(own[own >= 0], minlength=experts) for own in ids])
            counted = self._stages.count(ids[rank])
            _require(np.array_equal(counted, loads[rank]), "assignments are counted wrong")
            try:
                plan, physical = self._stages.route(loads, context, rank, ids[rank])
                twins = [plan_quota(loads, context, source) for source in range(len(ids))]
                for part in ("slot_expert", "quota", "share"):
                    is_same = np.array_equal(getattr(plan, part), getattr(twins[rank], part))
                    _require(is_same, "a plan is another one than its twin")
                shares = np.stack([twin.share for twin in twins])
                check_plan(loads, context, plan.slot_expert, plan.quota, shares)
            except ValueError as broken:
                raise _Wrong(str(broken)) from broken
            twin = reroute(ids[rank], plan.share, plan.slot_expert, shape.num_masters)
            parts = map(torch.from_numpy, (plan.slot_expert, plan.quota, plan.share, counted))
            is_wrong = self._checks.ids_are_wrong(
                ids[rank].reshape(-1), physical.reshape(-1), Found(_PLANNED, *parts)
            )
            is_same = torch.equal(physical, twin) and not is_wrong
            _require(is_same, "an assignment went to a wrong expert")
        return f"{_LOADS} loads"

    def copies(self, layers: Sequence[int]) -> str:
        """Slots get the bytes of masters, and copies give the answers of masters."""
        number, worst, problems, answers = 0, 0.0, list[_Wrong](), self._answers
        for layer in layers:
            expected = None if answers is None else answers.outputs(layer, None)
            if answers is not None and expected is not None and answers.says_nothing(expected):
                problems += self._why_no_number(layer)
            for slot_expert, by_relays in _patterns(self._context):
                problems += self._wrong_slots(layer, slot_expert, by_relays)
                number += int((slot_expert[self._stages.rank] >= 0).sum())
                if answers is not None and expected is not None:
                    found = answers.outputs(layer, torch.from_numpy(slot_expert))
                    apart = float(largest_difference(found, expected))
                    worst = max(worst, apart)
                    if not apart <= answers.bound:  # also where it is no number
                        differs = f"differs by {apart:.2g} of a token's largest value"
                        allowed = f"{answers.bound:.2g} are allowed"
                        wrong = f"layer {layer} computed by copies {differs}, {allowed}"
                        problems.append(_Wrong(wrong))
        if problems:  # only here: until now all ranks have copied together
            raise problems[0]
        return f"{number} copies in {len(layers)} layers, largest difference {worst:.1g}"

    def _why_no_number(self, layer: int) -> list[_Wrong]:
        """The problem of a layer whose masters give NaN or inf; a warning where none is known."""
        tensors, masters = self._stages.layers[layer].tensors, self._shape.num_masters
        floats = [tensor[:masters] for tensor in tensors if tensor.dtype in _FLOATS]
        given = f"layer {layer} gives NaN with its experts at home"
        if not all(tensor.isfinite().all() for tensor in floats):
            return [_Wrong(f"{given}: the checkpoint has NaN or inf; use another one", "")]
        self._warning = f"answers cannot be checked here: {given}, however small its tokens are"
        return []

    def _wrong_slots(self, layer: int, slot_expert: IntArray, by_relays: bool) -> list[_Wrong]:
        """Fill slots; what of this rank's has other bytes than its master, at once or later."""
        tensors = self._stages.layers[layer].tensors
        slots, none = torch.from_numpy(slot_expert), torch.zeros((1, 1), dtype=torch.int32)
        parts = (_PLANNED, slots, none, none, none[0])
        found = Found(*(part.to(tensors[0].device) for part in parts))
        told = self._stages.gather(self._checks.told(tensors, found).cpu().numpy())
        expected = self._checks.expected(torch.from_numpy(told)).item()
        for tensor in tensors:
            expert_bytes(tensor)[self._shape.num_masters :].fill_(_POISON)
        self._stages.replicate(layer, slot_expert, by_relays)
        at_once = self._checks.sum_of_slots(tensors, found).item()
        self._stages.gather(np.zeros(1, np.int64))  # by then all others have looked too
        if {at_once, self._checks.sum_of_slots(tensors, found).item()} == {expected}:
            return []
        return [_Wrong(f"slots of layer {layer} have other bytes than their masters")]


def _patterns(context: PlanContext) -> Iterator[tuple[IntArray, bool]]:
    """Contents of all slots (R, S), and whether relays bring them.

    Slots hold experts of the next ranks of the domain, until each was in one; then all ranks of a
    domain hold experts of its first.
    """
    shape, size = context.shape, context.domain_size
    ranks, slots = np.arange(shape.num_ranks)[:, None], np.arange(shape.num_slots)
    first, masters = ranks // size * size, shape.num_masters
    ahead = slots // masters + 1
    owners = first + (ranks - first + ahead) % size
    for turn in range(-(-masters // shape.num_slots)):
        held = owners * masters + (turn * shape.num_slots + slots) % masters
        yield np.where(ahead < size, held, -1).astype(np.int32), False
    if size > 2:
        held = np.where((slots < masters) & (ranks > first), first * masters + slots, -1)
        yield held.astype(np.int32), True


def _made_up_load(context: PlanContext, number: int) -> tuple[PlanContext, list[torch.Tensor]]:
    """A context and every rank's ids (T, K) int32, the same on all ranks.

    Skewed; every fourth of one hot expert, or empty; some of it padding, mostly nearly none; every
    second with speeds that differ.
    """
    shape, rng = context.shape, np.random.default_rng(number)
    speeds = rng.integers(FULL_SPEED // 8, FULL_SPEED + 1, shape.num_ranks)
    speeds[rng.integers(shape.num_ranks)] = FULL_SPEED
    chances = rng.dirichlet(np.full(shape.num_logical_experts, 0.3))
    size = shape.num_ranks, 0 if number % 4 == 3 else _TOKENS, 2
    ids = rng.choice(shape.num_logical_experts, size, p=chances).astype(np.int32)
    if number % 4 == 2:
        ids[:] = number % shape.num_logical_experts
    ids[rng.random(size) < (0.9 if number % 5 == 3 else 0.1)] = -1
    made = PlanContext.of(shape, context.domain_size, speeds if number % 2 else None)
    return made, list(map(torch.from_numpy, ids))


def _first_and_last(layers: Sequence[LayerSlots]) -> list[int]:
    """The first and last layer of each kind: experts have tensors of the same types and shapes."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        kind = tuple((tensor.dtype, tensor.shape) for tensor in layer.tensors)
        kinds.setdefault(kind, []).append(index)
    return sorted({index for of_kind in kinds.values() for index in (of_kind[0], of_kind[-1])})


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Wrong(otherwise)
