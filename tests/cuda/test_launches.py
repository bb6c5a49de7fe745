"""How much the host has to do for a layer, counted; nothing is computed."""

import pytest

pytest.importorskip("triton", reason="launches of Triton kernels are counted")

from tests.support.launches import HostWork, count_layers

# of a layer that is not a batch's first: launches, allocations, copies, events
MOST = {
    "balanced": (15, 22, 2, 8),
    "left_alone": (15, 22, 2, 8),
    "off": (15, 22, 2, 8),
    "decode": (1, 1, 0, 0),
}


def figures(work: HostWork) -> tuple[int, int, int, int]:
    return work.launches, work.allocations, work.copies, work.events


@pytest.mark.parametrize("kind", MOST)
def test_a_layer_asks_no_more_of_the_host(kind: str) -> None:
    first, *others = count_layers(kind)
    for work in others:
        assert all(map(int.__le__, figures(work), MOST[kind])), work
    assert first.launches <= MOST[kind][0] + 1, first  # the batch's speeds
    assert first.copies <= MOST[kind][2] + 2, first  # what this rank would have
