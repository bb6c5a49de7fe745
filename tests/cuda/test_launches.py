"""How much the host has to do for a layer, counted; nothing is computed."""

import pytest

pytest.importorskip("triton", reason="launches of Triton kernels are counted")

from tests.support.launches import HostWork, count_layers

# of a layer in the middle of a batch: launches, allocations, copies, events
MOST = {
    "balanced": (6, 1, 0, 2),  # the events time the experts
    "left_alone": (6, 1, 0, 2),  # the device alone knows: it ends three of them at once
    "off": (1, 1, 0, 0),
    "decode": (1, 1, 0, 0),
}
# how much more in the first layer: the batch's speeds; what this rank would have, there and back.
# Where the policy was off, all that says whether it still is.
FIRST = {"off": (5, 0, 3, 1), "decode": (0, 0, 1, 0)}
FIRST_BALANCED = (1, 0, 2, 0)


def figures(work: HostWork) -> tuple[int, int, int, int]:
    return work.launches, work.allocations, work.copies, work.events


@pytest.mark.parametrize("kind", MOST)
def test_a_layer_asks_no_more_of_the_host(kind: str) -> None:
    first, *others, last = map(figures, count_layers(kind))
    for found in others:
        assert all(map(int.__le__, found, MOST[kind])), found
    allowed = map(int.__add__, MOST[kind], FIRST.get(kind, FIRST_BALANCED))
    assert all(map(int.__le__, first, allowed)), first
    allowed = map(int.__add__, MOST[kind], (0, 0, 1, 1))  # the batch's records
    assert all(map(int.__le__, last, allowed)), last


@pytest.mark.parametrize("kind", MOST)
def test_the_host_waits_where_a_batch_ends_and_nowhere_else(kind: str) -> None:
    """So that no token is sampled from what a rank that gave up has computed; or, while the policy
    is off, where a batch begins."""
    waits = [work.waits for work in count_layers(kind)]
    others = [0] * (len(waits) - 1)
    expected = {"off": [1, *others], "decode": [0, *others]}
    assert waits == expected.get(kind, [*others, 1])


def test_stages_are_timed_in_some_batches_only() -> None:
    timed, other = (count_layers("balanced", batches)[1].events for batches in (1, 2))
    assert (timed, other) == (9, 2)
