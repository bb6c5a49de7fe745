"""Whatever the bytes: readers of files raise errors of ours, or read."""

import contextlib
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.model_configs import DEEPSEEK_V3, QWEN3_30B
from ultraep_lab.store import load_trace
from ultraep_serve.costs.kv_cache import kv_bytes_of
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import UltraEPError

NUMBERS = st.one_of(st.integers(), st.integers(0, 100), st.floats(), st.booleans())
VALUES = st.recursive(
    st.one_of(NUMBERS, st.none(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
COSTS = {"seconds_per_assignment": 1e-6, "bytes_per_expert": 10**6, "link_bytes_per_second": 1e9}
DAMAGES = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), max_size=4
)
often = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def damaged(content: bytes, damages: list[tuple[int, bytes]], kept: float) -> bytes:
    """``content`` overwritten in places and cut."""
    changed = bytearray(content)
    for position, piece in damages:
        start = position % len(changed)
        changed[start : start + len(piece)] = piece
    return bytes(changed[: round(kept * len(changed))])


KEPT = st.sampled_from([1.0, 1.0, 0.99, 0.5, 0.01])


@pytest.mark.parametrize("published", [DEEPSEEK_V3, QWEN3_30B])
@often
@given(changes=st.data())
def test_model_configurations(published: dict[str, int], changes: Any) -> None:
    config: dict[str, Any] = dict(published)
    for key in changes.draw(st.lists(st.sampled_from([*config, "text_config"]), max_size=3)):
        config[key] = changes.draw(VALUES)
    with contextlib.suppress(UltraEPError):
        assert kv_bytes_of(config) > 0


@often
@given(values=st.dictionaries(st.sampled_from([*COSTS, "plan_seconds", "x"]), VALUES))
def test_cost_models(values: dict[str, Any]) -> None:
    with contextlib.suppress(UltraEPError):
        costs = CostModel.from_json(json.dumps({**COSTS, **values})).integer_costs()
        assert costs.per_assignment > 0


@pytest.mark.parametrize("kind", ["ids", "loads"])
@often
@given(damages=DAMAGES, kept=KEPT)
def test_traces(
    kind: str, damages: list[tuple[int, bytes]], kept: float, tmp_path_factory: Any
) -> None:
    stream = io.BytesIO()
    if kind == "ids":
        about = np.array('{"num_experts": 8}')
        np.savez(stream, topk_ids=np.ones((4, 2, 2), np.int16), metadata=about)
    else:
        np.savez(stream, loads=np.ones((2, 2, 8), np.int32), phase=np.zeros(2, np.uint8))
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(damaged(stream.getvalue(), damages, kept))
    with contextlib.suppress(UltraEPError):
        assert load_trace(path, max_bytes=1 << 20).num_layers >= 0
