"""Loads on which policy ``eplb`` and an engine's own code are compared."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.real_traces import FOLDER
from ultraep_lab.comparators.eplb import eplb_copies
from ultraep_lab.store import load_trace
from ultraep_lab.trace import batches
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import ExpertShape

__all__ = ["SLOTS", "Case", "assert_same", "made_up", "recorded"]

SLOTS = 2
Case = tuple[NDArray[np.int64], int]  # an expert's load (E,), and ranks


def made_up() -> Iterator[Case]:
    """100 random loads of 16 to 128 experts on 2 to 16 ranks."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        ranks, experts = rng.choice([2, 4, 8, 16]), rng.choice([16, 32, 64, 128])
        chances = rng.dirichlet(np.full(experts, rng.choice([0.2, 0.5, 1, 3])))
        yield (chances * 100_000).astype(np.int64), int(ranks)


def recorded() -> Iterator[Case]:
    """Every layer of every batch of 4096 tokens that was recorded, on 2 to 16 ranks."""
    for name in ("law", "intent"):
        trace = load_trace(FOLDER / f"{name}.npz")
        for ranks in (2, 4, 8, 16):
            for loads in batches(trace, 4096, ranks):
                for layer in loads:
                    yield layer.sum(0, dtype=np.int64), ranks


def assert_same(weight: NDArray[np.int64], ranks: int, physical_to_logical: Any) -> None:
    """An engine's placement (E + R * SLOTS,) has as many copies of each expert as ours.

    Its ranks are as loaded, in any order. Experts that are equally heavy may have changed places,
    and so may ranks whose loads differ by a rounding of 32 bits.
    """
    ours = eplb_copies(weight[None, None], PlanContext.of(ExpertShape(ranks, weight.size, SLOTS)))
    theirs = np.zeros_like(ours)
    rank = np.arange(physical_to_logical.size) * ranks // physical_to_logical.size
    np.add.at(theirs, (physical_to_logical, rank), 1)
    counts = ours.sum(1)
    np.testing.assert_array_equal(counts, theirs.sum(1))
    per_copy = weight / counts
    ours, theirs = np.sort(per_copy @ ours), np.sort(per_copy @ theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
