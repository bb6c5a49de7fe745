"""The comparator `eplb` is what SGLang makes."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from tests.support.eplb_cases import SLOTS, Case, assert_same, made_up, recorded
from tests.support.real_traces import needs_real_traces

torch = pytest.importorskip("torch")
deepseek = pytest.importorskip(
    "sglang.srt.eplb.eplb_algorithms.deepseek", reason="SGLang's EPLB needs SGLang"
)


@pytest.mark.parametrize("cases", [made_up, pytest.param(recorded, marks=needs_real_traces)])
def test_eplb_is_what_the_engine_makes(cases: Callable[[], Iterable[Case]]) -> None:
    for weight, ranks in cases():
        made, _, _ = deepseek.rebalance_experts(
            torch.tensor(weight)[None], weight.size + ranks * SLOTS, 1, 1, ranks, False
        )
        assert_same(weight, ranks, np.asarray(made[0]))
