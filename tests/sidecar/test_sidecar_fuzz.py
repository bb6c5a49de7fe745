"""Whatever is asked and whatever the run directory contains: an answer, never a crash."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.rings import SyntheticRun, SyntheticTraffic
from tests.support.sidecar_runs import TOKEN
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.types import ExpertShape

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyntheticRun]:
    made = SyntheticRun(tmp_path, SHAPE, 2, SyntheticTraffic(tokens=512), ring_records=64)
    for _ in range(3):
        made.batch()
    yield made
    made.close()


def test_the_interface_keeps_to_its_document(tmp_path: Path, run: SyntheticRun) -> None:
    """Every other call bears the token, so that what lies behind it is reached as well."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(tmp_path, TOKEN))
    calls = 0

    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            nonlocal calls
            calls += 1
            case.headers.pop("authorization", None)
            bearer = {"Authorization": f"Bearer {TOKEN}"} if calls % 2 else {}
            case.call_and_validate(headers=bearer)

        check()
    assert calls > 80
