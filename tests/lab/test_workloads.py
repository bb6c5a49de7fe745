"""Made-up workloads are what they say: as imbalanced as asked, and changing when they should."""

import numpy as np
import pytest

from ultraep_lab.errors import TraceError
from ultraep_lab.imbalance import imbalance
from ultraep_lab.trace import Trace, batches
from ultraep_lab.workloads import KINDS, Workload, drawn_loads, make_trace


def workload(kind: str = "zipf", **changes: object) -> Workload:
    values = {
        "num_tokens": 8192,
        "num_layers": 2,
        "num_experts": 64,
        "top_k": 6,
        "num_ranks": 8,
        "imbalance": 2.0,
        "period": 2048,
    }
    return Workload(**{"kind": kind, **values, **changes})  # type: ignore[arg-type]


def imbalances(trace: Trace, batch_tokens: int, num_ranks: int) -> np.ndarray:
    """(batches, layers) on contiguous masters."""
    return np.array(
        [
            [imbalance(loads.sum(0).reshape(num_ranks, -1).sum(1)) for loads in batch]
            for batch in batches(trace, batch_tokens, num_ranks)
        ]
    )


@pytest.mark.parametrize("kind", ["zipf", "switch", "rotate"])
@pytest.mark.parametrize("wanted", [1.5, 3.0])
def test_the_imbalance_is_the_one_asked_for(kind: str, wanted: float) -> None:
    found = imbalances(make_trace(workload(kind, imbalance=wanted)), 2048, 8)
    assert found == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_trace(kind: str) -> None:
    one, two = (make_trace(workload(kind, num_tokens=300, period=100)) for _ in range(2))
    other = make_trace(workload(kind, num_tokens=300, period=100, seed=1))
    assert np.array_equal(one.topk_ids, two.topk_ids)
    assert not np.array_equal(one.topk_ids, other.topk_ids)
    assert one.sequence_lengths.sum() == one.num_tokens == 300


def test_impossible_imbalance_says_what_is_possible() -> None:
    """Top-6 over ranks of one expert: no rank can have more than 1/6 of a token's choices."""
    with pytest.raises(TraceError, match="highest found"):
        make_trace(workload(num_experts=8, imbalance=4.0))


@pytest.mark.parametrize(
    "layer", [[1, 10**400], [1e308] * 4, [0.5, 0.5], [True, False], ["1", "2"], [-1, 2], None, []]
)
def test_totals_that_are_no_integers_are_refused(layer: object) -> None:
    with pytest.raises(TraceError, match="the table of totals"):
        drawn_loads({"a": layer}, 2, 5000, 8, seed=1)


def test_a_trace_that_nobody_would_read_is_not_drawn() -> None:
    with pytest.raises(TraceError, match="bytes"):
        drawn_loads({"a": [1, 2]}, 2, 5000, 10**30, seed=1)
    with pytest.raises(TraceError, match="2147483647"):
        drawn_loads({"a": [1, 2]}, 2, 1 << 40, 8, seed=1)


def test_batches_from_totals_have_their_proportions() -> None:
    totals = {"a": [600, 200, 100, 100], "b": [0, 1, 1, 2]}
    trace = drawn_loads(totals, 2, 5000, 8, seed=1)
    assert trace.loads.shape == (8, 2, 2, 4)
    assert (trace.loads.sum(-1) == 5000).all()
    shares = trace.loads.sum((0, 2)) / trace.loads.sum((0, 2, 3))[:, None]
    wanted = [[0.6, 0.2, 0.1, 0.1], [0, 0.25, 0.25, 0.5]]
    assert shares == pytest.approx(np.array(wanted), abs=0.02)
    assert (drawn_loads(totals, 2, 5000, 8, seed=1).loads == trace.loads).all()
