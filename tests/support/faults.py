"""Faults of a rank that balances on CPU, put into its objects by tests; nothing else reaches them.

Each is given a ``Rank`` and a patch that takes it back.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from ultraep_kernels.contract import Plan

import ultraep_serve.balance.host.balancer as flow
from ultraep_serve.balance.backend import LayerSlots
from ultraep_serve.balance.host.balancer import HostBalancer
from ultraep_serve.types import ExpertShape, VerificationCheck

__all__ = ["FAULTS", "Fault", "Rank"]


@dataclass
class Rank:
    """What faults change."""

    balancer: HostBalancer
    shape: ExpertShape
    while_computing: Callable[[int], object]  # layer; what the engine does beside its work
    wrong_slots: bool = False  # the engine computes slots with the first master's scale


def flipped_bit(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    after_wait(rank, patch, lambda tensors, slot: flip(tensors[0][slot]))


def flip(tensor: torch.Tensor) -> None:
    content = tensor.view(torch.uint8).view(-1)
    content[content.numel() // 2] ^= 8


def stale_scale(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    after_wait(rank, patch, lambda tensors, slot: tensors[1][slot].copy_(tensors[1][0]))


def after_wait(
    rank: Rank,
    patch: pytest.MonkeyPatch,
    change: Callable[[Sequence[torch.Tensor], int], object],
) -> None:
    fabric = rank.balancer._fabric
    original = fabric.wait_slots

    def wait_slots(layer: LayerSlots, slot_expert: np.ndarray) -> None:
        original(layer, slot_expert)
        for slot in np.flatnonzero(slot_expert[fabric.rank] >= 0)[:1].tolist():
            change(layer.tensors, rank.shape.num_masters + slot)

    patch.setattr(fabric, "wait_slots", wait_slots)


def changed_ids(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], object]) -> None:
    original = flow.reroute

    def reroute(*args: Any) -> torch.Tensor:
        physical = original(*args)
        change(physical.view(-1))
        return physical

    patch.setattr(flow, "reroute", reroute)


def wrong_id(_: Rank, patch: pytest.MonkeyPatch) -> None:
    def change(flat: torch.Tensor) -> None:
        flat[int((flat >= 0).nonzero()[0])] ^= 1

    changed_ids(patch, change)


def lost_assignment(_: Rank, patch: pytest.MonkeyPatch) -> None:
    def change(flat: torch.Tensor) -> None:
        flat[int((flat >= 0).nonzero()[-1])] = -1

    changed_ids(patch, change)


def doubled_assignment(_: Rank, patch: pytest.MonkeyPatch) -> None:
    """A token goes twice to one of its experts, and not to the other."""

    def change(flat: torch.Tensor) -> None:
        first = int((flat[::2] != flat[1::2]).nonzero()[0]) * 2
        flat[first + 1] = flat[first]

    changed_ids(patch, change)


def padding_computed(_: Rank, patch: pytest.MonkeyPatch) -> None:
    def change(flat: torch.Tensor) -> None:
        flat[int((flat < 0).nonzero()[0])] = 0

    changed_ids(patch, change)


def miscounted(_: Rank, patch: pytest.MonkeyPatch) -> None:
    original = flow.count

    def count(*args: Any) -> tuple[np.ndarray, int]:
        load, unknown = original(*args)
        load[load.argmax()] -= load.any()
        return load, unknown

    patch.setattr(flow, "count", count)


def changed_plan(patch: pytest.MonkeyPatch, change: Callable[[Plan], Plan]) -> None:
    original = flow.plan_quota
    patch.setattr(flow, "plan_quota", lambda *args: change(original(*args)))


def other_plan(_: Rank, patch: pytest.MonkeyPatch) -> None:
    """As right as that of the other ranks."""

    def change(plan: Plan) -> Plan:
        return replace(plan, slot_expert=np.ascontiguousarray(plan.slot_expert[:, ::-1]))

    changed_plan(patch, change)


def moved(values: np.ndarray) -> np.ndarray:
    """One assignment goes from the rank that has most of an expert to the one after it."""
    made = values.copy()
    expert, rank = np.unravel_index(made.argmax(), made.shape)
    made[expert, rank] -= 1
    made[expert, (rank + 1) % made.shape[1]] += 1
    return made


def quota_off_by_one(_: Rank, patch: pytest.MonkeyPatch) -> None:
    def change(plan: Plan) -> Plan:
        quota = plan.quota.copy()
        quota[quota.sum(axis=1).argmax(), 0] += 1
        return replace(plan, quota=quota)

    changed_plan(patch, change)


def quota_moved(_: Rank, patch: pytest.MonkeyPatch) -> None:
    changed_plan(patch, lambda plan: replace(plan, quota=moved(plan.quota)))


def share_moved(_: Rank, patch: pytest.MonkeyPatch) -> None:
    changed_plan(patch, lambda plan: replace(plan, share=moved(plan.share)))


def changed_layers(
    rank: Rank, patch: pytest.MonkeyPatch, change: Callable[[LayerSlots], LayerSlots]
) -> None:
    patch.setattr(rank.balancer, "_layers", [change(layer) for layer in rank.balancer._layers])


def swapped_layers(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank.balancer, "_layers", rank.balancer._layers[::-1])


def never_copied(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    """Flags are raised, as if it had been."""
    changed_layers(rank, patch, lambda layer: replace(layer, chunks=layer.chunks * [1, 1, 0]))


def cut_short(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    changed_layers(rank, patch, lambda layer: replace(layer, chunks=layer.chunks - [0, 0, 1]))


def wrong_slot(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    def change(layer: LayerSlots) -> LayerSlots:
        return replace(layer, region_offsets=layer.region_offsets + layer.expert_bytes)

    changed_layers(rank, patch, change)


def wrong_expert(rank: Rank, patch: pytest.MonkeyPatch) -> None:
    def change(layer: LayerSlots) -> LayerSlots:
        return replace(layer, master_addresses=layer.master_addresses + layer.expert_bytes)

    changed_layers(rank, patch, change)


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
    put: Callable[[Rank, pytest.MonkeyPatch], object]
    found_by: VerificationCheck | None  # None: balancing cannot be doubted, only left
    on_all_ranks: bool = False


_ASSIGNMENTS, _SLOTS = VerificationCheck.ASSIGNMENTS, VerificationCheck.SLOTS
_PLANS, _ANSWERS = VerificationCheck.PLANS, VerificationCheck.ANSWERS
FAULTS = [
    Fault("a flipped bit in a slot", flipped_bit, _SLOTS),
    Fault("a stale scale", stale_scale, _SLOTS),
    Fault("a wrong id", wrong_id, _ASSIGNMENTS),
    Fault("a lost assignment", lost_assignment, _ASSIGNMENTS),
    Fault("a doubled assignment", doubled_assignment, _ASSIGNMENTS),
    Fault("padding that is computed", padding_computed, _ASSIGNMENTS),
    Fault("an assignment that is not counted", miscounted, _ASSIGNMENTS),
    Fault("two ranks with other plans", other_plan, _PLANS),
    Fault("a quota off by one, on one rank", quota_off_by_one, _PLANS),
    Fault("a quota off by one, on all ranks", quota_off_by_one, _PLANS, True),
    Fault("a quota moved, on one rank", quota_moved, _PLANS),
    Fault("a share moved", share_moved, _PLANS),
    Fault("a slot overwritten a batch early", overwritten_early, _SLOTS),
    Fault("swapped tensors of two layers", swapped_layers, _SLOTS),
    Fault("an expert that was never copied", never_copied, _SLOTS),
    Fault("a wrong slot index", wrong_slot, _SLOTS),
    Fault("a copy cut short", cut_short, _SLOTS),
    Fault("a wrong expert copied", wrong_expert, _SLOTS),
    Fault("weights replaced beside the masters", replaced_master, _SLOTS),
    Fault("slots that are not awaited", not_awaited, _SLOTS, True),
    Fault("a kernel that computes slots otherwise", wrong_answers, _ANSWERS),
]
