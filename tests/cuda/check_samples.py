"""Samples of the device's balancer, between processes: each kind of fault is found, and no other.

Host memory stands in for the GPU's, as in ``check_balancer``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ultraep_kernels.device.checksum import checksums, checksums_reference

pytest.importorskip("pydantic", reason="BalanceConfig needs it")

from tests.support.balancer_rigs import (
    CONFIG,
    LAYERS,
    Rig,
    Setup,
    device_rig,
    search_briefly,
    skewed,
)
from tests.support.interpreter import INTERPRETED
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.types import ExpertShape, Policy, TokenView, VerificationCheck

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="plays the device in host memory")
SHAPE = ExpertShape(2, 8, 2)
ASSIGNMENTS, SLOTS, PLANS = tuple(VerificationCheck)[:3]


def slots_of(rig: Rig, layer: int) -> list[torch.Tensor]:
    """Tensors of a layer, and where its first filled slot is."""
    return [tensor[SHAPE.num_masters :] for tensor in rig.layers[layer].tensors]


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).view(-1)[5] ^= 4


@dataclass(frozen=True)
class Fault:
    """What goes wrong on rank 1, before samples look at ids, or while the layer is computed."""

    name: str
    check: VerificationCheck
    ids: Callable[[torch.Tensor], object] = lambda _: None
    share: Callable[[torch.Tensor], object] = lambda _: None
    computing: Callable[[Rig, int], object] = lambda *_: None


def first_of(flat: torch.Tensor) -> int:
    return int((flat >= 0).nonzero()[0])


def overwrite(rig: Rig, layer: int) -> None:
    other = rig.layers[(layer + 1) % LAYERS].tensors[0]
    for slot in slots_of(rig, layer)[0]:
        slot.copy_(other[0] + 1)


def flip_all(rig: Rig, layer: int) -> None:
    for slot in slots_of(rig, layer)[0]:
        flip(slot)


def double(flat: torch.Tensor) -> None:
    flat[:40] = flat[first_of(flat)]


def other_slots(rig: Rig, _layer: int) -> None:
    found = rig.balancer._plans[0].found
    found.slot_expert.copy_(found.slot_expert.flip(1))


def other_quota(rig: Rig, _layer: int) -> None:
    rig.balancer._plans[0].found.quota[0] += 1


FAULTS = [
    Fault("flipped bit", SLOTS, computing=flip_all),
    Fault("stale scale", SLOTS, computing=lambda rig, at: slots_of(rig, at)[1].zero_()),
    Fault("overwritten early", SLOTS, computing=overwrite),
    Fault("wrong id", ASSIGNMENTS, ids=lambda flat: flat[first_of(flat)].bitwise_xor_(1)),
    Fault("lost assignment", ASSIGNMENTS, ids=lambda flat: flat[first_of(flat)].fill_(-1)),
    Fault("doubled assignment", ASSIGNMENTS, ids=double),
    Fault("other slots", PLANS, computing=other_slots),
    Fault("quota off by one", PLANS, computing=other_quota),
    Fault("share off by one", ASSIGNMENTS, share=lambda share: share[0].add_(1)),
]


def serve(rig: Rig, rank: int, faults: list[Fault]) -> dict[int, set[VerificationCheck]]:
    """What is found by layer in one batch, with one of ``faults`` in each."""
    samples, found = rig.balancer._samples, {layer: set() for layer in range(LAYERS)}
    by_layer = dict(enumerate(faults if rank == 1 else []))
    original = type(samples).routed

    def routed(layer: int, ids: torch.Tensor, physical: torch.Tensor, plan: Any) -> None:
        if layer in by_layer:
            by_layer[layer].ids(physical.view(-1))
            by_layer[layer].share(plan.share)
        original(samples, layer, ids, physical, plan)

    samples.routed = routed
    samples._doubt.raise_with = lambda check, layer, *_, **__: found[layer].add(check)
    for layer in range(LAYERS):
        rig.balancer.route(layer, skewed(rank), 360)
        rig.balancer._arriving[0].join()
        if layer in by_layer:
            by_layer[layer].computing(rig, layer)
        rig.balancer.computed()
    samples._look()
    return found


def run_faults(rank: int, run_path: Path) -> list[tuple[list[str], dict[int, set[Any]], Policy]]:
    search_briefly()
    setup = Setup(SHAPE, TokenView.OWN, CONFIG.replace(verify_every=1), is_sampled=True)
    rig = device_rig(rank, run_path, setup, patience_ns=60_000_000_000)
    outcomes = []
    for first in range(-LAYERS, len(FAULTS), LAYERS):
        faults = FAULTS[first : first + LAYERS] if first >= 0 else []
        found = serve(rig, rank, faults)
        outcomes.append(([fault.name for fault in faults], found, rig.recorder.policy))
        rig.recorder.policy = Policy.QUOTA
    assert set(rig.recorder.verified) == {ASSIGNMENTS, SLOTS, PLANS}
    return outcomes


def test_each_fault_is_found_and_the_policy_is_switched_off() -> None:
    with fresh_run_path() as run_path:
        first, faulty = run_ranks(run_faults, 2, run_path, timeout_seconds=240)
    nothing = {layer: set() for layer in range(LAYERS)}
    assert first[0] == faulty[0] == ([], nothing, Policy.QUOTA)
    kinds = {fault.name: fault for fault in FAULTS}
    for (names, found, _), (_, _, policy) in zip(faulty[1:], first[1:], strict=True):
        assert policy is Policy.OFF, names  # as rank 0 says to all
        for layer, name in enumerate(names):
            assert kinds[name].check in found[layer], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_checksums_are_those_of_the_twin(dtype: torch.dtype) -> None:
    tensors = [(torch.randn(5, *size) * 9).to(dtype) for size in ((3, 7), (2500,))]
    wanted = torch.tensor([1, 0, 2, 1, 0], dtype=torch.int32)
    found = checksums(tensors, wanted)
    assert torch.equal(found, checksums_reference(tensors, wanted))
    flip(tensors[1][2])
    assert (checksums(tensors, wanted) != found).tolist() == [False, False, True, False, False]
