"""Whatever is asked and whatever the run directory contains: an answer, never a crash."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings

from tests.support.ring_files import put
from tests.support.rings import SyntheticRun, SyntheticTraffic
from tests.support.sidecar_runs import TOKEN
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.ring import HEADER_BYTES
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)
PATHS = (
    "/v1/balance",
    "/v1/balance/heatmap",
    "/v1/balance/history",
    "/v1/balance/batches",
    "/v1/balance/layers/0",
    "/v1/config",
    "/readyz",
    "/metrics",
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyntheticRun]:
    made = SyntheticRun(tmp_path, SHAPE, 2, SyntheticTraffic(tokens=512), ring_records=64)
    for _ in range(3):
        made.batch()
    yield made
    made.close()


def test_the_interface_keeps_to_its_document(tmp_path: Path, run: SyntheticRun) -> None:
    """Every other call bears the token, so that what lies behind it is reached as well."""
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


def answers_everywhere(client: TestClient) -> None:
    for path in PATHS:
        assert client.get(path).status_code in (200, 404, 503), path


def test_what_is_no_ring_is_reported(tmp_path: Path, run: SyntheticRun) -> None:
    path = RunFiles(tmp_path).ring(0)
    original = path.read_bytes()
    client = TestClient(create_app(tmp_path, None))
    huge = bytearray(original)
    huge[8:16] = b"\xff" * 8  # records ever written
    os.mkfifo(tmp_path / "ring-7")
    (tmp_path / "ring-08").mkdir()
    (tmp_path / "ring-x").write_text("x")
    (tmp_path / "config.json").write_text("[" * 100_000)
    for content, reason in (
        (original[:100], "truncated"),
        (original[: HEADER_BYTES + 10], "truncated"),
        (random.Random(1).randbytes(9000), "not a ring"),
        (bytes(huge), "damaged"),
        (b"UEPRING\x01" + bytes(range(256)) * 40, "schema version"),
        (b"", "truncated"),
    ):
        put(path, content)
        answers_everywhere(client)
        assert reason in client.get("/readyz").json()["reasons"]["0"]
        rank = client.get("/v1/balance").json()["ranks"][0]
        assert (rank["state"], rank["alive"]) == ("missing", False)
    assert client.get("/v1/balance").json()["window_records"] == 6  # rank 1 is the primary one
    put(RunFiles(tmp_path).ring(1), b"")
    (tmp_path / "control").write_bytes(b"\xff" * 8192)
    answers_everywhere(client)
    assert set(client.get("/readyz").json()["reasons"]) == {"0", "1", "7"}
