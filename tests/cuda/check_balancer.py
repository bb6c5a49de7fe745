"""When DeviceBalancer times experts and records batches; one rank, in host memory.

What it answers is ``HostBalancer``'s: ``tests/emulated_gpu/kernels/scenarios.py``.
"""

import time
from dataclasses import replace
from unittest import mock

from ultraep_kernels.contract import Choice

from tests.support.balancer_rigs import CONFIG, LAYERS, alone, even
from tests.support.mirror import FakeRecorder
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.pages import Page
from ultraep_serve.costs.calibration import LEAST_ROWS
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.types import Decision

TIME_OF_CHOICE = Choice._fields.index("time")
NO_COSTS = IntegerCosts(1000, 0, 0, 0, 0, 0)


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
