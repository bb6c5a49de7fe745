"""DeviceBalancer against HostBalancer, between processes.

Every rank runs both on the same ids: physical ids, slots and records must be the same, bit for bit.
Host memory stands in for the GPU's; the device's balancer reaches it through driver and kernels.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from ultraep_kernels.contract import Choice

pytest.importorskip("pydantic", reason="BalanceConfig needs it")

from tests.support.balancer_rigs import (
    CONFIG,
    LAYERS,
    SMALL,
    Rig,
    Setup,
    alone,
    device_rig,
    even,
    host_rig,
    masters_of,
    search_briefly,
    skewed,
)
from tests.support.hosts import engine_group
from tests.support.interpreter import INTERPRETED
from tests.support.mirror import FakeRecorder
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.balance.cuda.recording import PendingBatch
from ultraep_serve.costs.calibration import LEAST_ROWS
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="plays the device in host memory")
TIME_OF_CHOICE = Choice._fields.index("time")
NO_COSTS = IntegerCosts(1000, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Batch:
    """What is routed in both layers, and under what."""

    name: str
    ids_of: Callable[[int], torch.Tensor]  # by rank
    policy: Policy = Policy.QUOTA
    expected: Decision | None = Decision.PLANNED


def with_bad_id(rank: int, bad_rank: int) -> torch.Tensor:
    ids = skewed(0 if bad_rank < 0 else rank)
    if rank == abs(bad_rank):
        ids[5, 0] = 1 << 20
    return ids


def batches_of(view: TokenView) -> list[Batch]:
    """In an order that shows what outlasts a batch."""
    shared = view is TokenView.SHARED

    def same(ids_of: Callable[..., torch.Tensor]) -> Callable[[int], torch.Tensor]:
        return (lambda rank: ids_of(0)) if shared else ids_of

    found = [
        Batch("skewed", same(skewed)),
        Batch("small", lambda rank: skewed(0)[: SMALL - 1], expected=None),
        Batch("balanced", even, expected=Decision.BALANCED),
        Batch("bad id", lambda rank: with_bad_id(rank, -1 if shared else 1),
              expected=Decision.INCONSISTENT),
        Batch("only padding", lambda rank: torch.full((16, 2), -1), expected=Decision.BALANCED),
        Batch("too dear", same(skewed), expected=None),
        Batch("forced", same(skewed), Policy.IDEAL, expected=Decision.FORCED),
    ]  # fmt: skip
    if shared:
        found.append(
            Batch("ranks differ", lambda rank: skewed(rank)[:100], expected=Decision.INCONSISTENT)
        )
    return [
        *found,
        Batch("int64", lambda rank: same(skewed)(rank).long()),
        Batch("off", same(skewed), Policy.OFF, expected=None),
    ]


def compare(rank: int, run_path: Path, setup: Setup, names: tuple[str, ...]) -> int:
    """Slots filled and compared; AssertionError where the two differ."""
    search_briefly()
    group = engine_group(run_path, rank, setup.shape.num_ranks) if setup.domain_size else None
    rigs = (
        host_rig(rank, run_path, setup, group),
        device_rig(rank, run_path, setup, group=group),
    )
    filled = 0
    for batch in batches_of(setup.view):
        if names and batch.name not in names:
            continue
        for rig in rigs:
            rig.recorder.policy = batch.policy
        ids = batch.ids_of(rank)
        tokens = SMALL - 1 if batch.name == "small" else 100
        for layer in range(LAYERS):
            host, device = (rig.balancer.route(layer, ids, tokens) for rig in rigs)
            assert device.dtype == ids.dtype
            assert torch.equal(host.int(), device.int()), (batch.name, layer)
            for rig in rigs:
                rig.balancer.receive()  # before that copies may be on their way
            filled += compare_slots(rank, rigs, layer, setup.shape.num_masters)
            for rig in rigs:
                rig.balancer.computed()
        if batch.expected is not None:
            decisions = {event["decision"] for event in rigs[1].recorder.events[-LAYERS:]}
            assert decisions == {batch.expected}, batch.name
    assert rigs[0].recorder.events == rigs[1].recorder.events
    assert rigs[1].recorder.lost == 0
    rigs[1].fabric.require_peers()
    rigs[1].fabric.exchange(torch.zeros(rigs[1].fabric.limits.row_width, dtype=torch.int32))
    return filled


def compare_slots(rank: int, rigs: tuple[Rig, Rig], layer: int, num_masters: int) -> int:
    """Slots that the host's plan filled, which must hold the master's bytes in both."""
    routed, filled = rigs[0].balancer._routed, 0
    if routed is None or routed.plan is None:
        return 0
    for slot, expert in enumerate(routed.plan.slot_expert[rank].tolist()):
        if expert >= 0:
            owner, local = divmod(expert, num_masters)
            masters = masters_of(owner, layer, num_masters)
            for rig in rigs:
                for alias, master in zip(rig.layers[layer].tensors, masters, strict=True):
                    assert torch.equal(alias[num_masters + slot], master[local])
            filled += 1
    return filled


@pytest.mark.parametrize("view", list(TokenView))
def test_both_balancers_do_the_same(view: TokenView) -> None:
    setup = Setup(ExpertShape(2, 8, 1), view)
    with fresh_run_path() as run_path:
        filled = run_ranks(compare, 2, run_path, setup, (), timeout_seconds=400.0)
    assert sum(filled) > 0


def test_speeds_that_differ() -> None:
    setup = Setup(ExpertShape(2, 8, 1), TokenView.OWN, CONFIG.replace(speeds="1.0,0.5"))
    with fresh_run_path() as run_path:
        names = ("skewed", "forced")
        filled = run_ranks(compare, 2, run_path, setup, names, timeout_seconds=400.0)
    assert sum(filled) > 0


def turn_out_otherwise(rank: int, run_path: Path, setup: Setup) -> int:
    """Slots filled in layers that all ranks expected to be left alone, whatever came how late."""
    search_briefly()
    masters = setup.shape.num_masters
    is_there = property(lambda page: rank != setup.shape.num_ranks - 1)  # the last rank's is late
    late = mock.patch.object(PendingBatch, "is_done", is_there)
    late.start()
    rigs = host_rig(rank, run_path, setup), device_rig(rank, run_path, setup)
    balancer, every_layer = rigs[1].balancer, {(layer, 0) for layer in range(LAYERS)}
    routed = (even(rank), even(rank), skewed(rank).long(), skewed(rank), even(rank))
    expected = (set(), set(), every_layer, every_layer, set())  # of the batch before last
    filled = [0] * len(routed)
    for batch, ids in enumerate(routed):
        for layer in range(LAYERS):
            host, device = (rig.balancer.route(layer, ids, 100) for rig in rigs)
            assert device.dtype == ids.dtype
            assert torch.equal(host.long(), device.long()), (batch, layer)
            filled[batch] += compare_slots(rank, rigs, layer, masters)
            assert balancer._expected.left_alone == expected[batch]
            for rig in rigs:
                rig.balancer.receive()
                rig.balancer.computed()
    late.stop()
    for _ in routed:
        balancer.computed()
    assert rigs[0].recorder.events == rigs[1].recorder.events
    rigs[1].fabric.require_peers()
    rigs[1].fabric.exchange(torch.zeros(rigs[1].fabric.limits.row_width, dtype=torch.int32))
    assert filled[0] == filled[1] == filled[4] == 0
    return filled[2]


@pytest.mark.parametrize("relay", ["never", "always"])
def test_a_layer_that_was_expected_to_be_left_alone_is_balanced_all_the_same(relay: str) -> None:
    """In the launch that plans; others send beside it."""
    setup = Setup(ExpertShape(4, 8, 1), TokenView.OWN, relay=relay)
    with fresh_run_path() as run_path:
        filled = run_ranks(turn_out_otherwise, 4, run_path, setup, timeout_seconds=400.0)
    assert sum(filled) > 0


def overlap(rank: int, run_path: Path, setup: Setup) -> list[int]:
    """Replicas that each of two micro-batches read, the second routed before the first computes."""
    search_briefly()
    shape, rig = setup.shape, device_rig(rank, run_path, setup)
    wanted = skewed(rank if setup.view is TokenView.OWN else 0)
    ids = [wanted, 7 - wanted.clamp(min=0)]
    replicas = [0, 0]
    for layer in range(LAYERS):
        routed = [rig.balancer.route(layer, own, 100, number) for number, own in enumerate(ids)]
        for number, (logical, physical) in enumerate(zip(ids, routed, strict=True)):
            rig.balancer.receive(number)
            slots = slots_read(rank, shape, layer, rig, logical, physical)
            assert {slot // shape.num_replica_slots for slot in slots} <= {number}
            replicas[number] += len(slots)
        for number in range(2):
            rig.balancer.computed(number)
    assert [(event["batch"], event["layer"]) for event in rig.recorder.events] == [
        (1, layer) for layer in range(LAYERS) for _ in ids
    ]
    rig.recorder.policy = Policy.OFF
    for layer in range(LAYERS):
        for number, own in enumerate(ids):
            rig.balancer.route(layer, own, 100, number)
        for number in range(2):
            rig.balancer.computed(number)
    assert rig.recorder.events[2 * LAYERS :] == [Decision.POLICY_OFF]
    rig.fabric.exchange(torch.zeros(rig.fabric.limits.row_width, dtype=torch.int32))
    rig.fabric.require_peers()
    return replicas


def slots_read(
    rank: int,
    shape: ExpertShape,
    layer: int,
    rig: Rig,
    logical: torch.Tensor,
    physical: torch.Tensor,
) -> list[int]:
    """Slots of ``rank`` among ``physical`` ids, which all hold what ``logical`` ones mean."""
    found = []
    for expert, place in zip(logical.view(-1).tolist(), physical.view(-1).tolist(), strict=True):
        owner, local = divmod(place, shape.num_local)
        if place < 0 or owner != rank:
            continue
        home, index = divmod(expert, shape.num_masters)
        masters = masters_of(home, layer, shape.num_masters)
        for tensor, master in zip(rig.layers[layer].tensors, masters, strict=True):
            assert torch.equal(tensor[local], master[index])
        if local >= shape.num_masters:
            found.append(local - shape.num_masters)
    return found


@pytest.mark.parametrize("view", list(TokenView))
def test_overlapping_micro_batches_keep_their_slots(view: TokenView) -> None:
    """What the first copied is there when it computes, after the second has copied too."""
    setup = Setup(ExpertShape(2, 8, 1, num_micro_batches=2), view)
    with fresh_run_path() as run_path:
        replicas = run_ranks(overlap, 2, run_path, setup, timeout_seconds=400.0)
    assert all(sum(of_batch) > 0 for of_batch in zip(*replicas, strict=True))


@pytest.mark.parametrize("view", list(TokenView))
def test_domains(view: TokenView) -> None:
    """Four ranks in two domains: each copies its own hot experts, and hears of all tokens."""
    setup = Setup(ExpertShape(4, 8, 1), view, domain_size=2, relay="always")
    names = ("skewed", "balanced", "bad id", "forced")
    with fresh_run_path() as run_path:
        filled = run_ranks(compare, 4, run_path, setup, names, timeout_seconds=500.0)
    assert sum(filled[:2]) > 0


def test_weights_move_only_where_both_say_that_it_saves_time() -> None:
    dear = replace(NO_COSTS, per_expert_sent=10**9)
    setup = Setup(ExpertShape(2, 8, 1), TokenView.OWN, costs=dear)
    names = ("balanced", "too dear")
    with fresh_run_path() as run_path:
        filled = run_ranks(compare, 2, run_path, setup, names, timeout_seconds=400.0)
    assert filled == [0, 0]


def test_experts_are_timed_in_the_stream_and_published() -> None:
    recorder = FakeRecorder()
    balancer = alone(CONFIG, recorder, replace(NO_COSTS, per_assignment=10**8))
    ids = even(0).repeat(LEAST_ROWS // 8, 1)  # as many rows per expert as are measured
    for _ in range(43):
        for layer in range(LAYERS):
            balancer.route(layer, ids, 100)
            clock = balancer.receive()
            time.sleep(0.002)
            clock.stop()
            time.sleep(0.001)  # combine
            balancer.computed()
    took = [event["experts_ns"] for event in recorder.events]
    assert min(took) >= 2_000_000
    assert balancer._choice.asked[TIME_OF_CHOICE] >= 2_000_000 * 1000 // ids.numel()


def test_records_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    balancer = alone(CONFIG, recorder)
    is_done = [False]
    monkeypatch.setattr(PendingBatch, "is_done", property(lambda page: is_done[0]))
    for _ in range(3):
        for layer in range(LAYERS):
            balancer.route(layer, even(0), 100)
            balancer.receive()
            balancer.computed()
        balancer.route(0, even(0), 1)  # a small batch in between is counted in its turn
    assert recorder.events == []
    is_done[0] = True
    for _ in range(3):  # a few at a time
        balancer.computed()
    found = [
        event.name if isinstance(event, Decision) else (event["batch"], event["layer"])
        for event in recorder.events
    ]
    small = ["SMALL"]
    assert found == [(1, 0), (1, 1), *small, (3, 0), (3, 1), *small, (5, 0), (5, 1), *small]


def test_no_record_is_lost_where_a_batch_has_been_recorded_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its page is used again three batches later, when the device is done with it."""
    recorder = FakeRecorder()
    balancer = alone(CONFIG, recorder)
    monkeypatch.setattr(balancer, "_record_what_is_done", lambda: None)
    for _ in range(4):
        for layer in range(LAYERS):
            balancer.route(layer, even(0), 100)
            balancer.receive()
            balancer.computed()
    found = [(event["batch"], event["layer"]) for event in recorder.events]
    assert (found, recorder.lost) == ([(1, 0), (1, 1)], 0)
