"""Faults of a rank that balances on CPU, put into its objects by tests; nothing else reaches them.

Each is given a ``Rank`` and a patch that takes it back.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from ultraep_kernels.contract import Plan

import ultraep_serve.balance.host.balancer as flow
from ultraep_serve.balance.host.balancer import HostBalancer
from ultraep_serve.balance.slots import LayerSlots
from ultraep_serve.types import ExpertShape, VerificationCheck


@dataclass
class Rank:
    """What faults change."""

    balancer: HostBalancer
    shape: ExpertShape
    while_computing: Callable[[int], object]  # layer; what the engine does beside its work
    wrong_slots: bool = False  # the engine computes slots with the first master's scale


Put: TypeAlias = Callable[[Rank, pytest.MonkeyPatch], object]
Tensors: TypeAlias = Sequence[torch.Tensor]


def after_wait(change: Callable[[Tensors, int], object]) -> Put:
    """Does ``change`` (a layer's tensors, a slot's index in them) when slots have arrived."""

    def put(rank: Rank, patch: pytest.MonkeyPatch) -> None:
        fabric = rank.balancer._fabric
        original = fabric.wait_slots

        def wait_slots(layer: LayerSlots, slot_expert: np.ndarray) -> None:
            original(layer, slot_expert)
            for slot in np.flatnonzero(slot_expert[fabric.rank] >= 0)[:1].tolist():
                change(layer.tensors, rank.shape.num_masters + slot)

        patch.setattr(fabric, "wait_slots", wait_slots)

    return put


def flipped_bit(tensors: Tensors, slot: int) -> None:
    content = tensors[0][slot].view(torch.uint8).view(-1)
    content[content.numel() // 2] ^= 8


def stale_scale(tensors: Tensors, slot: int) -> None:
    tensors[1][slot].copy_(tensors[1][0])


def in_ids(change: Callable[[torch.Tensor], object]) -> Put:
    """Does ``change`` to physical ids, flat."""

    def put(_: Rank, patch: pytest.MonkeyPatch) -> None:
        original = flow.reroute

        def reroute(*args: Any) -> torch.Tensor:
            physical = original(*args)
            change(physical.view(-1))
            return physical

        patch.setattr(flow, "reroute", reroute)

    return put


def wrong_id(flat: torch.Tensor) -> None:
    flat[int((flat >= 0).nonzero()[0])] ^= 1


def lost_assignment(flat: torch.Tensor) -> None:
    flat[int((flat >= 0).nonzero()[-1])] = -1


def doubled_assignment(flat: torch.Tensor) -> None:
    """A token goes twice to one of its experts, and not to the other."""
    first = int((flat[::2] != flat[1::2]).nonzero()[0]) * 2
    flat[first + 1] = flat[first]


def padding_computed(flat: torch.Tensor) -> None:
    flat[int((flat < 0).nonzero()[0])] = 0


def miscounted(_: Rank, patch: pytest.MonkeyPatch) -> None:
    original = flow.count

    def count(*args: Any) -> tuple[np.ndarray, int]:
        load, unknown = original(*args)
        load[load.argmax()] -= load.any()
        return load, unknown

    patch.setattr(flow, "count", count)


def in_plan(field: str, change: Callable[[np.ndarray], np.ndarray]) -> Put:
    """Has ``change`` of a copy of ``field`` in the place of what is planned."""

    def put(_: Rank, patch: pytest.MonkeyPatch) -> None:
        original = flow.plan_quota

        def plan_quota(*args: Any) -> Plan:
            plan = original(*args)
            return replace(plan, **{field: change(getattr(plan, field).copy())})

        patch.setattr(flow, "plan_quota", plan_quota)

    return put


def turned(slot_expert: np.ndarray) -> np.ndarray:
    """As right as that of the other ranks."""
    return np.ascontiguousarray(slot_expert[:, ::-1])


def moved(values: np.ndarray) -> np.ndarray:
    """One assignment goes from the rank that has most of an expert to the one after it."""
    expert, rank = np.unravel_index(values.argmax(), values.shape)
    values[expert, rank] -= 1
    values[expert, (rank + 1) % values.shape[1]] += 1
    return values


def one_more(quota: np.ndarray) -> np.ndarray:
    quota[quota.sum(axis=1).argmax(), 0] += 1
    return quota


def in_layers(change: Callable[[LayerSlots], LayerSlots]) -> Put:
    """Has ``change`` of each layer in its place."""

    def put(rank: Rank, patch: pytest.MonkeyPatch) -> None:
        layers = [change(layer) for layer in rank.balancer._layers]
        patch.setattr(rank.balancer, "_layers", layers)

    return put


def never_copied(layer: LayerSlots) -> LayerSlots:
    """Flags are raised, as if it had been."""
    return replace(layer, chunks=layer.chunks * [1, 1, 1, 0])


def cut_short(layer: LayerSlots) -> LayerSlots:
    return replace(layer, chunks=layer.chunks - [0, 0, 0, 1])


def replaced_master(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    """The engine computes with weights that it has put into other memory."""
    samples = rank.balancer._samples
    assert samples is not None
    parameters = [
        [torch.nn.Parameter(tensor * 2, requires_grad=False) for tensor in layer]
        for layer in samples._sampled.parameters
    ]
    patch.setattr(samples, "_sampled", replace(samples._sampled, parameters=parameters))


def not_awaited(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    """On all ranks; what is sent comes late."""
    fabric = rank.balancer._fabric
    original = fabric.stream

    def stream(*args: Any) -> None:
        for tensor in args[0].tensors:
            tensor[rank.shape.num_masters :].zero_()
        time.sleep(0.01)
        if fabric.rank == 2:
            time.sleep(0.2)
        original(*args)

    patch.setattr(fabric, "stream", stream)
    patch.setattr(fabric, "wait_slots", lambda *_: None)


def overwritten_early(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    """This rank sends another layer's experts while the engines compute."""
    balancer = rank.balancer

    def send(layer: int) -> None:
        assert balancer._routed is not None
        plan = balancer._routed.plan
        if plan is not None:
            other = balancer._layers[(layer + 1) % len(balancer._layers)]
            direct = np.full(plan.slot_expert.shape, -1, np.int64)
            balancer._fabric.stream(other, plan.slot_expert, direct, rank.shape.num_masters)

    patch.setattr(rank, "while_computing", send)


def wrong_answers(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank, "wrong_slots", True)


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and how it is found."""

    name: str
    put: Put
    found_by: VerificationCheck
    on_all_ranks: bool = False


_ASSIGNMENTS, _SLOTS = VerificationCheck.ASSIGNMENTS, VerificationCheck.SLOTS
_PLANS, _ANSWERS = VerificationCheck.PLANS, VerificationCheck.ANSWERS
FAULTS = [
    Fault("a flipped bit in a slot", after_wait(flipped_bit), _SLOTS),
    Fault("a stale scale", after_wait(stale_scale), _SLOTS),
    Fault("a wrong id", in_ids(wrong_id), _ASSIGNMENTS),
    Fault("a lost assignment", in_ids(lost_assignment), _ASSIGNMENTS),
    Fault("a doubled assignment", in_ids(doubled_assignment), _ASSIGNMENTS),
    Fault("padding that is computed", in_ids(padding_computed), _ASSIGNMENTS),
    Fault("an assignment that is not counted", miscounted, _ASSIGNMENTS),
    Fault("two ranks with other plans", in_plan("slot_expert", turned), _PLANS),
    Fault("a quota off by one, on one rank", in_plan("quota", one_more), _PLANS),
    Fault("a quota off by one, on all ranks", in_plan("quota", one_more), _PLANS, True),
    Fault("a share moved", in_plan("share", moved), _PLANS),
    Fault("a slot overwritten a batch early", overwritten_early, _SLOTS),
    Fault("an expert that was never copied", in_layers(never_copied), _SLOTS),
    Fault("a copy cut short", in_layers(cut_short), _SLOTS),
    Fault("weights replaced beside the masters", replaced_master, _SLOTS),
    Fault("slots that are not awaited", not_awaited, _SLOTS, True),
    Fault("a kernel that computes slots otherwise", wrong_answers, _ANSWERS),
]
