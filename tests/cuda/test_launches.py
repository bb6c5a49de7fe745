"""How much the host has to do for a layer, counted; nothing is computed."""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="launches of Triton kernels are counted")

from ultraep_kernels.device import launch as launch_module

from tests.support.launches import (
    HostWork,
    count_layers,
    let_device_say,
    prepared_launches,
    recorded_balancer,
    recorded_streams,
)
from tests.support.mirror import FakeRecorder
from tests.support.offline import Launch, bound
from ultraep_serve.balance.cuda import balancer as balancer_module
from ultraep_serve.balance.cuda.pages import Page
from ultraep_serve.types import Decision, ExpertShape

# of a layer in the middle of a batch: launches, allocations, copies, events
MOST = {
    "balanced": (4, 0, 0, 4),  # the events time the experts; a stream forks and joins
    "left_alone": (2, 0, 0, 2),  # as it was in the batch before last
    "stayed": (2, 0, 0, 2),  # its slots held all that the batch before last wanted
    "off": (1, 0, 0, 0),
    "decode": (1, 0, 0, 0),
}
# how much more in the first layer: what this rank would have goes to the device. Where the policy
# was off, all that says whether it still is, and the batch's records.
FIRST = {"off": (1, 0, 2, 3), "decode": (0, 0, 0, 0)}
FIRST_BALANCED = (0, 0, 1, 0)


def figures(work: HostWork) -> tuple[int, int, int, int]:
    return work.launches, work.allocations, work.copies, work.events


@pytest.mark.parametrize("slot_memory", ["per_layer", "shared"])
@pytest.mark.parametrize("kind", MOST)
def test_a_layer_asks_no_more_of_the_host(kind: str, slot_memory: str) -> None:
    first, *others, last = map(figures, count_layers(kind, slot_memory=slot_memory))
    for found in others:
        assert all(map(int.__le__, found, MOST[kind])), found
    allowed = map(int.__add__, MOST[kind], FIRST.get(kind, FIRST_BALANCED))
    assert all(map(int.__le__, first, allowed)), first
    allowed = map(int.__add__, MOST[kind], (0, 0, 1, 1))  # the batch's records
    assert all(map(int.__le__, last, allowed)), last


@pytest.mark.parametrize("kind", MOST)
def test_the_host_does_not_wait_for_the_device(kind: str) -> None:
    """While it launches one batch ahead, as engines that schedule ahead have it."""
    for batches in range(1, 6):
        assert not any(work.waits for work in count_layers(kind, batches)), batches


@pytest.mark.parametrize("kind", ["balanced", "off"])
def test_a_host_that_is_further_ahead_waits_where_a_batch_begins(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So that all ranks expect the same; it says so once."""
    with caplog.at_level("INFO"):
        work = count_layers(kind, 5, lag=2)
    assert [layer.waits for layer in work] == [1] + [0] * (len(work) - 1)
    said = [text for text in caplog.messages if "more than two batches ahead" in text]
    assert len(said) == 1


@pytest.mark.parametrize("decoded", [0, 7])
def test_stages_are_timed_in_some_batches_only(decoded: int) -> None:
    """Whatever is decoded between them."""
    found = [count_layers("balanced", batches, decoded=decoded)[1].events for batches in (1, 2, 9)]
    assert found == [10, 4, 10]


def test_experts_are_sent_beside_dispatch_and_arrive_before_they_compute() -> None:
    ids = torch.zeros((300, 4), dtype=torch.int32)
    with recorded_streams() as streams:
        balancer = recorded_balancer(FakeRecorder())
        for layer in range(2):
            streams.label = f"{layer} "
            balancer.route(layer, ids, 300)
            streams.run("dispatch")
            balancer.receive()
            for part in ("experts", "more experts"):
                streams.run(part)
            balancer.experts_done()
            balancer.computed()
    behind = streams.behind
    assert behind["0 _stream_kernel"] >= {"0 _count_kernel", "0 plan_kernel"}
    assert "0 _stream_kernel" not in behind["0 dispatch"]
    assert "0 dispatch" not in behind["0 _stream_kernel"]
    assert behind["0 _receive_kernel"] >= {"0 _stream_kernel", "0 dispatch"}
    assert "0 _receive_kernel" in behind["0 experts"] < behind["0 more experts"]
    assert [made.function.__name__ for made in streams.launches].count("_receive_kernel") == 2
    # slots, and what tells who sends what, are free again
    assert {"0 _stream_kernel", "0 more experts"} <= behind["1 _count_kernel"]
    assert behind["1 _count_kernel"] < behind["1 _stream_kernel"]


def test_micro_batches_do_not_wait_for_each_others_experts() -> None:
    ids = torch.zeros((300, 4), dtype=torch.int32)
    halves = {0: ThreadPoolExecutor(1), 1: ThreadPoolExecutor(1)}  # engines give each a thread
    with recorded_streams() as streams:
        balancer = recorded_balancer(FakeRecorder(), ExpertShape(8, 64, 2, num_micro_batches=2))

        def route(half: int) -> None:
            streams.label = f"{half} "
            balancer.route(0, ids, 300, half)

        def compute(half: int) -> None:
            streams.label = f"{half} "
            balancer.receive(half)
            streams.run("experts")
            balancer.computed(half)

        for step in (route, compute):
            for half, thread in halves.items():
                thread.submit(step, half).result()
    sent = [
        made.arguments for made in streams.launches if made.function.__name__ == "_receive_kernel"
    ]
    own = [[table.data_ptr() for table in each["sends"]] for each in sent]
    assert not set(own[0]) & set(own[1])  # the other half would overwrite it
    assert balancer._fabric.epoch.data_ptr() not in own[0] + own[1]
    assert "1 _stream_kernel" not in streams.behind["0 experts"]
    assert {"0 _stream_kernel", "0 _receive_kernel"} <= streams.behind["0 experts"]
    assert {"1 _stream_kernel", "1 _receive_kernel"} <= streams.behind["1 experts"]


@pytest.mark.parametrize("kind", ["balanced", "left_alone"])
def test_ids_are_not_kept_for_launches_that_are_made_again(kind: str) -> None:
    with prepared_launches(lambda *_: 0):
        balancer = recorded_balancer(FakeRecorder())
        balancer._expected.without_copies = {(0, 0)} if kind == "left_alone" else set()
        for _ in range(2):
            ids = torch.zeros((300, 4), dtype=torch.int32)
            balancer.route(0, ids, 300)
            balancer.receive()
            balancer.computed()
            kept = weakref.ref(ids)
            del ids
            assert kept() is None


def test_layers_share_memory_for_physical_ids() -> None:
    """Graphs too; what one of another size was captured with stays where it is."""
    with recorded_streams():
        balancer = recorded_balancer(FakeRecorder(), ExpertShape(8, 64, 2, num_micro_batches=2))
        found = dict[int, set[int]]()
        for tokens in (300, 1, 300, 1):
            ids = torch.zeros((tokens, 4), dtype=torch.int32)
            for half in (0, 1):
                made = [balancer.route(layer, ids, tokens, half) for layer in (0, 1)]
                assert made[0] is made[1]
                found.setdefault(tokens, set()).add(made[0].data_ptr())
        assert len(found[300] | found[1]) == 4
        for others in (ids.long(), ids[1:]):
            assert torch.equal(balancer.route(1, others, tokens) * 0, others)


def test_a_capture_leaves_the_batches_before_it_alone() -> None:
    """CUDA would give it up; a batch that was left open goes to the host behind it."""
    ids, send, sent = torch.zeros((300, 4), dtype=torch.int32), Page.send, list[int]()

    def sending(page: Page) -> None:
        sent.append(page.number)
        send(page)

    with recorded_streams(), mock.patch.object(Page, "send", sending):
        balancer = recorded_balancer(FakeRecorder())

        def run(tokens: int, num_layers: int) -> None:
            for layer in range(num_layers):
                balancer.route(layer, ids, tokens)
                balancer.receive()
                balancer.computed()

        with mock.patch.object(Page, "is_done", property(lambda _: False)):
            run(300, 4)
            run(300, 1)
        asked = property(lambda _: pytest.fail("the host asks whether a batch is done"))
        with (
            mock.patch.object(balancer_module, "is_capturing", return_value=True),
            mock.patch.object(Page, "is_done", asked),
        ):
            run(300, 4)
            run(0, 4)
        assert sent == [1]
        run(0, 1)
    assert sent == [1, 2]


def compiled_for(launches: list[Launch]) -> set[tuple[str, str]]:
    """Kernels by name, and what a launch on a GPU would compile each of them for."""
    return {
        (made.function.__name__, repr(bound(made.function, made.arguments).specialised))
        for made in launches
    }


@pytest.mark.parametrize(
    ("num_micro_batches", "slot_memory"),
    [(1, "shared"), (2, "shared"), (1, "per_layer"), (2, "per_layer")],
)
def test_nothing_is_compiled_while_serving(num_micro_batches: int, slot_memory: str) -> None:
    shape, numbers = ExpertShape(8, 64, 2, num_micro_batches), range(num_micro_batches)
    with recorded_streams() as streams:
        balancer = recorded_balancer(FakeRecorder(), shape, slot_memory=slot_memory)
        balancer._fabric.wait_at_least(600)  # as while loading: more than 32 bits
        balancer.warm_up()
        warm = compiled_for(streams.launches)
        streams.launches.clear()
        balancer.end_loading()
        every_layer = {(layer, number) for layer in range(4) for number in numbers}
        for dtype in (torch.int32, torch.int64):
            many = torch.zeros(4 * 4097 + 1, dtype=dtype)
            for first, tokens in ((0, 4096), (1, 4096), (1, 4097), (0, 0), (0, 1), (3, 16)):
                ids = many[first : first + 4 * tokens].view(tokens, 4)
                for balancer._expected.without_copies in (set(), set(every_layer)):
                    for layer in range(4):
                        for number in numbers:
                            balancer.route(layer, ids, 20_000, number)
                            balancer.receive(number)
                            balancer.computed(number)
                balancer.route(0, ids, 1)
        served = compiled_for(streams.launches)
    assert {name for name, _ in served} == {name for name, _ in warm}
    assert not served - warm


@pytest.mark.parametrize("kind", ["balanced", "left_alone", "domains", "copies stay"])
def test_a_launch_that_is_made_again_passes_what_triton_passes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word by word, with what the layer would launch with if it were the first of its kind."""
    call, found = launch_module.Launch.__call__, list[tuple[int, list[int]]]()

    def noting(launch: launch_module.Launch, programs: int, *changing: Any) -> None:
        before, is_first = len(asked), changing[0].dtype not in launch._again
        if not is_first:
            given = launch._given | dict(zip(launch._names, changing, strict=True))
            launch._kernel[(programs,)](**given, **launch._options)
        call(launch, programs, *changing)
        if is_first:
            del asked[before:]

    def launched(config: Any, _function: Any, parameters: Any, _more: None) -> int:
        words = [ctypes.c_uint64.from_address(each).value for each in parameters]
        found.append((config._obj.grid_x, words))
        return 0

    monkeypatch.setattr(launch_module.Launch, "__call__", noting)
    with prepared_launches(launched) as asked:
        slot_memory = "per_layer" if kind == "copies stay" else "shared"
        balancer = recorded_balancer(FakeRecorder(), slot_memory=slot_memory)
        if kind == "left_alone":
            let_device_say(balancer, Decision.BALANCED)
        if kind == "domains":
            balancer._fabric._all_gather_rows = mock.Mock()
        for tokens in (300, 300, 300, 300, 307, 1):
            ids = torch.zeros((tokens, 4), dtype=torch.int32)
            for layer in (0, 1, 2):
                balancer.route(layer, ids, 300)
                balancer.receive()
                balancer.computed()
            balancer.route(0, ids, 1)
    assert len(found) > 10
    assert found == asked


def test_a_kernel_that_takes_memory_of_tritons_is_launched_by_triton() -> None:
    """Each time: where that memory lies is its own affair."""
    with prepared_launches(lambda *_: pytest.fail("launched without it"), scratch=16) as asked:
        balancer, ids = recorded_balancer(FakeRecorder()), torch.zeros((5, 4), dtype=torch.int32)
        for number in range(3):
            balancer.route(0, ids, 1)
            assert len(asked) == 1 + number


def test_an_error_of_the_driver_is_raised() -> None:
    with prepared_launches(lambda *_: 719):
        balancer, ids = recorded_balancer(FakeRecorder()), torch.zeros((5, 4), dtype=torch.int32)
        balancer.route(0, ids, 1)
        with pytest.raises(RuntimeError, match="CUDA error 719"):
            balancer.route(0, ids, 1)
