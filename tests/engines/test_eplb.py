"""The comparator `eplb` places experts as an engine's own code does."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.real_traces import FOLDER, needs_real_traces
from ultraep_lab.comparators.eplb import eplb_copies
from ultraep_lab.store import load_trace
from ultraep_lab.trace import batches
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import ExpertShape

pytestmark = pytest.mark.engine  # imports one

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


def engines_own(engine: str) -> Callable[..., Any]:
    """Its function of loads (1, E), physical experts, groups, nodes and ranks."""
    if engine == "vllm":
        policy = pytest.importorskip("vllm.distributed.eplb.policy.default", reason="needs vLLM")
        return policy.DefaultEplbPolicy.rebalance_experts  # type: ignore[no-any-return]
    deepseek = pytest.importorskip("sglang.srt.eplb.eplb_algorithms.deepseek", reason="no SGLang")
    return lambda *of: deepseek.rebalance_experts(*of, False)[0]


@pytest.mark.parametrize("cases", [made_up, pytest.param(recorded, marks=needs_real_traces)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eplb_is_what_the_engine_makes(engine: str, cases: Callable[[], Iterable[Case]]) -> None:
    """As many copies of each expert, and ranks as loaded, in any order.

    Experts that are equally heavy may have changed places, and so may ranks whose loads differ by a
    rounding of 32 bits.
    """
    torch, rebalance = pytest.importorskip("torch"), engines_own(engine)
    for weight, ranks in cases():
        physical = weight.size + ranks * SLOTS
        made = np.asarray(rebalance(torch.tensor(weight)[None], physical, 1, 1, ranks)[0])
        shape = ExpertShape(ranks, weight.size, SLOTS)
        ours = eplb_copies(weight[None, None], PlanContext.of(shape))
        theirs = np.zeros_like(ours)
        np.add.at(theirs, (made, np.arange(made.size) * ranks // made.size), 1)
        counts = ours.sum(1)
        np.testing.assert_array_equal(counts, theirs.sum(1))
        ours, theirs = (np.sort((weight / counts) @ copies) for copies in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
