"""Comparator `eplb` is as good as vLLM's own code, on made-up loads and on recorded ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.real_traces import FOLDER, needs_real_traces
from ultraep_serve.lab.store import load_trace
from ultraep_serve.lab.trace import batches
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.eplb_slots import past_copies
from ultraep_serve.types import ExpertShape

pytestmark = pytest.mark.engine  # imports one

SLOTS = 2
Case = tuple[Any, int]  # an expert's load (E,), and ranks


def made_up() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for _ in range(100):
        ranks, experts = rng.choice([2, 4, 8, 16]), rng.choice([16, 32, 64, 128])
        chances = rng.dirichlet(np.full(experts, rng.choice([0.2, 0.5, 1, 3])))
        yield (chances * 100_000).astype(np.int64), int(ranks)


def recorded() -> Iterator[Case]:
    for name in ("law", "intent"):
        trace = load_trace(FOLDER / f"{name}.npz")
        for ranks in (2, 4, 8, 16):
            for number, loads in enumerate(batches(trace, 4096, ranks)):
                if number == 4:
                    break
                for layer in loads:
                    yield layer.sum(0, dtype=np.int64), ranks


def imbalance_of(weight: Any, copies: Any) -> float:
    """Of ``weight`` (E,) split evenly over ``copies`` (E, R), which may be several on a rank."""
    rank_load = weight @ (copies / copies.sum(1, keepdims=True))
    return float(rank_load.max() / rank_load.mean())


def vllm_copies(weight: Any, ranks: int) -> Any:
    """Copies (E, R) as vLLM's default policy places them."""
    torch = pytest.importorskip("torch")
    default = pytest.importorskip(
        "vllm.distributed.eplb.policy.default", reason="vLLM's EPLB needs vLLM"
    )
    physical = weight.size + ranks * SLOTS
    policy = default.DefaultEplbPolicy
    found = policy.rebalance_experts(torch.tensor(weight)[None].double(), physical, 1, 1, ranks)
    copies = np.zeros((weight.size, ranks))
    np.add.at(copies, (found[0].numpy(), np.arange(physical) // (physical // ranks)), 1)
    return copies


@pytest.mark.parametrize(
    ("cases", "most"),
    [(made_up, 0.005), pytest.param(recorded, 0.001, marks=needs_real_traces)],
)
def test_eplb_is_as_good_as_the_engine(cases: Any, most: float) -> None:
    """Mean imbalances agree. Where a rank gets two copies of an expert, vLLM keeps both."""
    ours, theirs = [], []
    for weight, ranks in cases():
        context = PlanContext.of(ExpertShape(ranks, weight.size, SLOTS))
        own = past_copies(weight[None, None], context, fixed_masters=False)
        ours.append(imbalance_of(weight, own))
        theirs.append(imbalance_of(weight, vllm_copies(weight, ranks)))
    assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=most)
