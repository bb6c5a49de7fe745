"""Pipeline stages have ranks and layers of their own; the sidecar shows them as one server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from ultraep_serve.system.topology import PipelineStage
from ultraep_serve.types import ExpertShape

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)
LAYERS = (3, 2)  # of each stage
BATCHES = 4


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[list[SyntheticRun]]:
    runs = [
        SyntheticRun(tmp_path, SHAPE, layers, seed=number, pipeline=PipelineStage(number, 2))
        for number, layers in enumerate(LAYERS)
    ]
    for _ in range(BATCHES):
        for run in runs:
            run.batch()
    yield runs
    for run in runs:
        run.close()


def test_all_layers_of_all_stages_are_shown(stages: list[SyntheticRun], client: TestClient) -> None:
    assert client.get("/readyz").status_code == 200
    balance = client.get("/v1/balance").json()
    assert [layer["layer"] for layer in balance["layers"]] == list(range(sum(LAYERS)))
    assert {layer["records"] for layer in balance["layers"]} == {BATCHES}
    assert balance["batches"]["planned"] == BATCHES
    assert balance["num_ranks"] == SHAPE.num_ranks
    assert [rank["rank"] for rank in balance["ranks"]] == [0, 1, 2, 3]
    assert balance["last_batch"]["batch"] == BATCHES
    (newest, *_) = client.get("/v1/balance/batches").json()["batches"]
    assert sum(newest["layers"].values()) == sum(LAYERS)


def test_a_host_shows_the_stages_it_has(tmp_path: Path, client: TestClient) -> None:
    run = SyntheticRun(tmp_path, SHAPE, LAYERS[1], pipeline=PipelineStage(1, 2))
    run.batch()
    assert client.get("/readyz").status_code == 200
    ranks = client.get("/v1/balance").json()["ranks"]
    assert [rank["rank"] for rank in ranks] == [2, 3]
    run.close()
