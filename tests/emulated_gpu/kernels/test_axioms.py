"""The protocol of flags under the axioms of PTX: no execution that they allow reads what is stale.

``tests/protocol`` has every order of steps but no weak memory; this has weak memory, and few steps.
"""

from collections.abc import Callable

import pytest

pytest.importorskip("z3", reason="the solver that looks for executions")

from tests.emulated_gpu.kernels.axioms import Event, allows

pytestmark = pytest.mark.interpreter
Program = list[Event]


def post(thread: str, flag: str, epoch: int, scope: str = "sys") -> Program:
    """As ``_signals.post`` compiles: every thread of the program is at the barrier before."""
    return [
        Event(thread, "barrier", f"before {flag}"),
        Event(thread, "fence", order="release", scope=scope),
        Event(thread, "write", flag, epoch, scope=scope, alias=f"of {thread}"),
    ]


def wait(thread: str, flag: str, epoch: int, scope: str = "sys") -> Program:
    """As ``_signals.wait`` compiles, once the flag has the epoch."""
    return [
        Event(thread, "read", flag, returns=epoch, scope=scope, alias=f"of {thread}"),
        Event(thread, "fence", order="acquire", scope=scope),
        Event(thread, "barrier", f"after {flag}"),
    ]


def message() -> Program:
    """Rank 0 writes into rank 1's memory; other threads write and read than post and wait."""
    return [
        Event("0.0.1", "write", "data", 1, alias="by 0"),
        Event("0.0.1", "barrier", "before flag"),
        *post("0.0.0", "flag", 1),
        *wait("1.0.0", "flag", 1),
        Event("1.0.1", "barrier", "after flag"),
        Event("1.0.1", "proxy"),
        Event("1.0.1", "read", "data", returns=0, alias="by 1"),
    ]


def chain() -> Program:
    """Rank 2 reads what rank 0 has written, and knows it from rank 1 alone."""
    return [
        Event("0.0.1", "write", "data", 1, alias="by 0"),
        Event("0.0.1", "barrier", "before flag 1"),
        *post("0.0.0", "flag 1", 1),
        *wait("1.0.0", "flag 1", 1),
        Event("1.0.1", "barrier", "after flag 1"),
        Event("1.0.1", "barrier", "before flag 2"),
        *post("1.0.0", "flag 2", 1),
        *wait("2.0.0", "flag 2", 1),
        Event("2.0.1", "barrier", "after flag 2"),
        Event("2.0.1", "proxy"),
        Event("2.0.1", "read", "data", returns=0, alias="by 2"),
    ]


def reuse() -> Program:
    """Rank 1's experts read a slot that rank 0 overwrites once it has the row that comes after.

    Kernels of a stream follow each other like programs at a barrier.
    """
    return [
        Event("1.0.0", "read", "slot", returns=1, alias="by 1"),
        Event("1.0.0", "barrier", "stream"),
        Event("1.1.1", "barrier", "stream"),
        Event("1.1.1", "barrier", "before row"),
        *post("1.1.0", "row", 2),
        *wait("0.0.0", "row", 2),
        Event("0.0.1", "barrier", "after row"),
        Event("0.0.1", "proxy"),
        Event("0.0.1", "write", "slot", 1, alias="by 0"),
    ]


def arrivals() -> Program:
    """Two programs of a launch arrive; the last one reads what the first has written."""
    return [
        Event("0.0.1", "write", "part", 1),
        Event("0.0.1", "barrier", "first"),
        Event("0.0.0", "barrier", "first"),
        Event("0.0.0", "update", "counter", 1, returns=0, order="acq_rel", scope="gpu"),
        Event("0.1.0", "update", "counter", 2, returns=1, order="acq_rel", scope="gpu"),
        Event("0.2.0", "update", "counter", 3, returns=2, order="acq_rel", scope="gpu"),
        Event("0.2.0", "barrier", "last"),
        Event("0.2.1", "barrier", "last"),
        Event("0.2.1", "read", "part", returns=0),
    ]


PROGRAMS: list[Callable[[], Program]] = [message, chain, reuse, arrivals]


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_stale_is_read(program: Callable[[], Program]) -> None:
    assert not allows(program())


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_should_be_read_can_be(program: Callable[[], Program]) -> None:
    """The programs have executions at all."""
    *rest, last = program()
    if last.kind == "read":
        assert allows([*rest, Event(last.thread, "read", last.place, returns=1, alias=last.alias)])
    else:
        first = rest[0]
        asked = Event(first.thread, "read", first.place, returns=0, alias=first.alias)
        assert allows([asked, *rest[1:], last])


@pytest.mark.parametrize("program", [message, reuse, arrivals])
def test_every_fence_and_barrier_is_needed(program: Callable[[], Program]) -> None:
    events = program()
    for position, event in enumerate(events):
        if event.kind in ("fence", "barrier", "proxy"):
            assert allows(events[:position] + events[position + 1 :]), event


@pytest.mark.parametrize("scope", ["weak", "gpu"])
@pytest.mark.parametrize("program", [message, reuse])
def test_flags_reach_other_ranks_at_system_scope_only(
    program: Callable[[], Program], scope: str
) -> None:
    narrowed = [
        Event(**(vars(each) | {"scope": scope})) if each.kind == "write" and each.value > 0
        and each.scope == "sys" else each
        for each in program()
    ]  # fmt: skip
    assert allows(narrowed)


@pytest.mark.parametrize("order", ["", "acquire", "release"])
def test_arrivals_acquire_and_release(order: str) -> None:
    weakened = [
        Event(**(vars(each) | {"order": order})) if each.kind == "update" else each
        for each in arrivals()
    ]
    assert allows(weakened)


def test_only_whoever_reads_behind_its_arrival_must_acquire_by_it() -> None:
    """All others may release alone, which no run can show to be a mistake."""
    *rest, last, first_barrier, second_barrier, read = arrivals()
    alone = [
        Event(**(vars(each) | {"order": "release"})) if each.kind == "update" else each
        for each in rest
    ]
    assert not allows([*alone, last, first_barrier, second_barrier, read])
    released = Event(**(vars(last) | {"order": "release"}))
    assert allows([*alone, released, first_barrier, second_barrier, read])


def test_a_status_that_only_grows_needs_no_order() -> None:
    """A bit that a wait sets is never lost to another's, in whatever order they are set."""
    set_bits = [
        Event("0.0.0", "update", "status", 1, returns=0, scope="gpu"),
        Event("0.1.0", "update", "status", 3, scope="gpu"),
    ]
    both = Event("0.2.0", "read", "status", returns=3, scope="gpu")
    assert allows([*set_bits, both])
    lost = Event("0.1.0", "update", "status", 2, returns=0, scope="gpu")
    assert not allows([set_bits[0], lost])
