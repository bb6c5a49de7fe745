"""Comparator `eplb` places experts as vLLM's own code does."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from tests.support.eplb_cases import SLOTS, Case, assert_same, made_up, recorded
from tests.support.real_traces import needs_real_traces

pytestmark = pytest.mark.engine  # imports one


@pytest.mark.parametrize("cases", [made_up, pytest.param(recorded, marks=needs_real_traces)])
def test_eplb_is_what_the_engine_makes(cases: Callable[[], Iterable[Case]]) -> None:
    torch = pytest.importorskip("torch")
    policy = pytest.importorskip(
        "vllm.distributed.eplb.policy.default", reason="vLLM's EPLB needs vLLM"
    ).DefaultEplbPolicy
    for weight, ranks in cases():
        physical = weight.size + ranks * SLOTS
        made = policy.rebalance_experts(torch.tensor(weight)[None], physical, 1, 1, ranks)
        assert_same(weight, ranks, np.asarray(made[0]))
