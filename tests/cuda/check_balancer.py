"""DeviceBalancer against HostBalancer, between processes.

Every rank runs both on the same ids: physical ids, slots and records must be the same, bit for bit.
Host memory stands in for the GPU's; the device's balancer reaches it through driver and kernels.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from ultraep_kernels.contract import Choice

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
from tests.support.cases import cases
from tests.support.mirror import FakeRecorder
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.pages import Page
from ultraep_serve.costs.calibration import LEAST_ROWS
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

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


def compare(rank: int, run_path: Path, setup: Setup) -> int:
    """Slots filled and compared; AssertionError where the two differ."""
    search_briefly()
    rigs = host_rig(rank, run_path, setup), device_rig(rank, run_path, setup)
    filled = 0
    for batch in batches_of(setup.view):
        for rig in rigs:
            rig.recorder.policy = batch.policy
            if batch.name == "int64" and rank == 1:
                rig.balancer.forget()
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


@cases("view", list(TokenView))
def test_both_balancers_do_the_same(view: TokenView) -> None:
    setup = Setup(ExpertShape(2, 8, 1), view)
    with fresh_run_path() as run_path:
        filled = run_ranks(compare, 2, run_path, setup, timeout_seconds=400.0)
    assert sum(filled) > 0


def test_experts_are_timed_in_the_stream_and_published() -> None:
    recorder = FakeRecorder()
    balancer = alone(CONFIG, recorder, replace(NO_COSTS, per_assignment=10**8))
    ids = even(0).repeat(LEAST_ROWS // 8, 1)  # as many rows per expert as are measured
    for _ in range(43):
        for layer in range(LAYERS):
            balancer.route(layer, ids, 100)
            balancer.receive()
            time.sleep(0.002)
            balancer.experts_done()
            time.sleep(0.001)  # combine
            balancer.computed()
    took = [event["experts_ns"] for event in recorder.events]
    assert min(took) >= 2_000_000
    assert balancer._choice.asked[TIME_OF_CHOICE] >= 2_000_000 * 1000 // ids.numel()


def run_batch(balancer: DeviceBalancer) -> None:
    for layer in range(LAYERS):
        balancer.route(layer, even(0), 100)
        balancer.receive()
        balancer.computed()


def test_records_wait_for_the_device() -> None:
    recorder = FakeRecorder()
    balancer = alone(CONFIG, recorder)
    with mock.patch.object(Page, "is_done", False):
        for _ in range(2):
            run_batch(balancer)
            balancer.route(0, even(0), 1)  # a small batch in between is counted at once
    assert recorder.events == [Decision.SMALL] * 2
    balancer.computed()
    found = [(event["batch"], event["layer"]) for event in recorder.events[2:]]
    assert found == [(batch, layer) for batch in (1, 3) for layer in range(LAYERS)]


def test_no_record_is_lost_where_the_host_has_not_come_by() -> None:
    """Its page is used again three batches later, when the device is done with it."""
    recorder = FakeRecorder()
    balancer = alone(CONFIG, recorder)
    record = balancer._record_what_is_done
    where_it_must = lambda until=None: until and record(until)  # noqa: E731
    with mock.patch.object(balancer, "_record_what_is_done", where_it_must):
        for _ in range(4):
            run_batch(balancer)
    found = [(event["batch"], event["layer"]) for event in recorder.events]
    assert found == [(batch, layer) for batch in (1, 2, 3) for layer in range(LAYERS)]
