"""Samples of the device's balancer, between processes: each check finds its faults, and no other.

Host memory stands in for the GPU's; the device's balancer reaches it through driver and kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ultraep_kernels.device.checksum import checksums
from ultraep_kernels.host.checksum import checksums as checksums_on_host

from tests.support.balancer_rigs import (
    CONFIG,
    LAYERS,
    Rig,
    Setup,
    device_rig,
    search_briefly,
    skewed,
)
from tests.support.cases import cases
from tests.support.hosts import engine_group
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.proof.answers import Answers
from ultraep_serve.types import ExpertShape, Policy, TokenView, VerificationCheck

SHAPE = ExpertShape(2, 8, 2)
ASSIGNMENTS, SLOTS, PLANS, ANSWERS = VerificationCheck
HIDDEN = 4


class Engine:
    """Two ranks that have the same tokens, and the sum of what they compute."""

    def __init__(self, rank: int, run_path: Path) -> None:
        self._rank, self._group = rank, engine_group(run_path, rank, SHAPE.num_ranks).on_host
        self.rig: Rig | None = None
        self.wrong_slots = False  # its kernel computes slots with another scale

    def compute(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        assert self.rig is not None
        _, scale = self.rig.layers[layer].tensors
        local = physical.long() - self._rank * SHAPE.num_local
        own = (local >= 0) & (local < SHAPE.num_local)
        local = torch.where(own, local, 0)
        scales = scale[local, 0] + self.wrong_slots * (local >= SHAPE.num_masters)
        output = x * torch.where(own, weights * scales, 0).sum(dim=1, keepdim=True)
        torch.distributed.all_reduce(output, group=self._group)
        return output

    def answers(self) -> Answers:
        return Answers(self.compute, 2, HIDDEN, torch.float32, torch.device("cpu"), seed=0)


@dataclass
class Faulty:
    """A rank in which something goes wrong in a layer."""

    rig: Rig
    engine: Engine
    layer: int

    @property
    def slots(self) -> list[torch.Tensor]:
        """The layer's tensors (S, ...)."""
        return [tensor[SHAPE.num_masters :] for tensor in self.rig.layers[self.layer].tensors]

    @property
    def samples(self) -> Any:
        return self.rig.balancer._samples


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).view(-1)[5] ^= 4


@dataclass(frozen=True)
class Fault:
    """What goes wrong: before samples look at ids, while the layer is computed, or all along."""

    name: str
    check: VerificationCheck
    ids: Callable[[torch.Tensor], object] = lambda _: None
    share: Callable[[torch.Tensor], object] = lambda _: None
    computing: Callable[[Faulty], object] = lambda _: None
    all_along: Callable[[Faulty], AbstractContextManager[None]] = lambda _: nullcontext()
    rank: int = 1  # 0 has the experts that all want, and sends them


def first_of(flat: torch.Tensor) -> int:
    return int((flat >= 0).nonzero()[0])


def flip_all(at: Faulty) -> None:
    for slot in at.slots[0]:
        flip(slot)


def sent(
    change: Callable[[torch.Tensor], object],
) -> Callable[[Faulty], AbstractContextManager[None]]:
    """The table by which experts are sent is another one: masters, slots, strides and sizes."""

    @contextmanager
    def changed(at: Faulty) -> Iterator[None]:
        table = at.rig.balancer._chunks[at.layer][1:].view(-1, 4)
        before = table.clone()
        change(table)
        yield
        table.copy_(before)

    return changed


@contextmanager
def replaced_master(at: Faulty) -> Iterator[None]:
    """The engine computes with weights that it has put into other memory."""
    before = at.samples._sampled
    parameters = [[tensor * 2 for tensor in layer] for layer in before.parameters]
    at.samples._sampled = replace(before, parameters=parameters)
    yield
    at.samples._sampled = before


@contextmanager
def other_kernel(at: Faulty) -> Iterator[None]:
    at.engine.wrong_slots = True
    yield
    at.engine.wrong_slots = False


FAULTS = [
    Fault("flipped bit", SLOTS, computing=flip_all),
    Fault("wrong id", ASSIGNMENTS, ids=lambda flat: flat[first_of(flat)].bitwise_xor_(1)),
    Fault("padding computed", ASSIGNMENTS, ids=lambda flat: flat[flat.argmin()].fill_(0)),
    Fault("quota off by one", PLANS,
          computing=lambda at: at.rig.balancer._parts[0].plan.found.quota[0].add_(1)),
    Fault("share off by one", ASSIGNMENTS, share=lambda share: share[0].add_(1)),
    Fault("never copied", SLOTS, all_along=sent(lambda table: table[:, 3].zero_()), rank=0),
    Fault("weights replaced beside the masters", SLOTS, all_along=replaced_master, rank=0),
    # of the samples, counted with those of the first batch, the tenth has answers
    Fault("kernel that computes slots otherwise", ANSWERS, all_along=other_kernel),
]  # fmt: skip


def serve(at: Faulty, rank: int, faults: list[Fault]) -> dict[int, set[VerificationCheck]]:
    """What is found by layer in one batch, with one of ``faults`` in each."""
    rig, samples, found = at.rig, at.samples, {layer: set() for layer in range(LAYERS)}
    by_layer = {layer: fault for layer, fault in enumerate(faults) if fault.rank == rank}
    original = type(samples).routed

    def routed(layer: int, ids: torch.Tensor, physical: torch.Tensor, *rest: Any) -> None:
        if layer in by_layer:
            by_layer[layer].ids(physical.view(-1))
            by_layer[layer].share(rest[0].share)
        original(samples, layer, ids, physical, *rest)

    samples.routed = routed
    samples._raise = lambda check, layer, **_: found[layer].add(check)
    for at.layer in range(LAYERS):
        fault = by_layer.get(at.layer, Fault("none", SLOTS))
        for slots in at.slots:
            slots.zero_()  # what is not copied cannot be there from the batch before
        with fault.all_along(at):
            rig.balancer.route(at.layer, skewed(rank), 360)
            rig.balancer.receive()
            fault.computing(at)
            rig.balancer.computed()
    samples._look()
    return found


def run_faults(rank: int, run_path: Path) -> list[tuple[list[str], dict[int, set[Any]], Policy]]:
    search_briefly()
    engine = Engine(rank, run_path)
    setup = Setup(SHAPE, TokenView.OWN, CONFIG.replace(verify_every=1), is_sampled=True,
                  answers=engine.answers())  # fmt: skip
    rig = engine.rig = device_rig(rank, run_path, setup, patience_ns=60_000_000_000)
    outcomes, at = [], Faulty(rig, engine, 0)
    for first in range(-LAYERS, len(FAULTS), LAYERS):
        faults = FAULTS[first : first + LAYERS] if first >= 0 else []
        found = serve(at, rank, faults)
        outcomes.append(([fault.name for fault in faults], found, rig.recorder.policy))
        rig.recorder.policy = Policy.QUOTA
    assert set(rig.recorder.verified) == set(VerificationCheck)
    return outcomes


def test_each_fault_is_found_and_the_policy_is_switched_off() -> None:
    with fresh_run_path() as run_path:
        ranks = run_ranks(run_faults, 2, run_path, timeout_seconds=240)
    nothing = {layer: set() for layer in range(LAYERS)}
    assert ranks[0][0] == ranks[1][0] == ([], nothing, Policy.QUOTA)
    kinds = {fault.name: fault for fault in FAULTS}
    for (names, found, policy), (_, also_found, _) in zip(*(own[1:] for own in ranks), strict=True):
        assert policy is Policy.OFF, names  # as rank 0 says to all
        for layer, name in enumerate(names):
            assert kinds[name].check in found[layer] | also_found[layer], name


def overlap(rank: int, run_path: Path) -> tuple[int, set[int], Policy]:
    """Layers that were checked, those found wrong, and the policy after two batches of two."""
    search_briefly()
    shape = replace(SHAPE, num_replica_slots=1, num_micro_batches=2)
    setup = Setup(shape, TokenView.OWN, CONFIG.replace(verify_every=1), is_sampled=True)
    rig = device_rig(rank, run_path, setup, patience_ns=60_000_000_000)
    found: set[int] = set()
    rig.balancer._samples._raise = lambda _, layer, **__: found.add(layer)
    for batch in range(2):
        for layer in range(LAYERS):
            for number, wanted in enumerate((skewed(rank), 7 - skewed(rank).clamp(min=0))):
                rig.balancer.route(layer, wanted, 360, number)
            for number in (0, 1):
                rig.balancer.receive(number)
            if batch == 0 and layer == 1:  # rank 1's experts are those that the second one wants
                flip(rig.layers[layer].tensors[0][shape.num_masters + 1 - rank])
            for number in (0, 1) if rank else (1, 0):  # ranks may end them in another order
                rig.balancer.computed(number)
    rig.fabric.require_peers()
    return len(rig.recorder.verified), found, rig.recorder.policy


def test_micro_batches_that_overlap_are_sampled() -> None:
    with fresh_run_path() as run_path:
        ranks = run_ranks(overlap, 2, run_path, timeout_seconds=240)
    for verified, found, _ in ranks:
        assert found == {1}
        assert verified >= 3 * 2 * (2 * LAYERS - 1)  # three checks; the last layer's come later
    assert ranks[0][2] is Policy.OFF


@cases("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_checksums_are_those_of_the_twin(dtype: torch.dtype) -> None:
    """Kernels want some tensors in another order, at odd addresses, or have none."""
    whole, long = ((torch.randn(5, *size) * 9).to(dtype) for size in ((7, 12), (2500,)))
    tensors = [whole.transpose(1, 2), whole[:, :3], whole[:, 0, 1:4], whole[:, :0], long]
    wanted = torch.tensor([1, 0, 2, 1, 0], dtype=torch.int32)
    found = checksums(tensors, wanted)
    assert torch.equal(found, checksums_on_host(tensors, wanted))
    apart = [checksums([tensor], wanted) for tensor in tensors]
    whole[2, 0, 2] += 1
    assert (checksums(tensors, wanted) != found).tolist() == [False, False, True, False, False]
    differ = [
        not torch.equal(checksums([t], wanted), old) for t, old in zip(tensors, apart, strict=True)
    ]
    assert differ == [True, True, True, False, False]
