"""What the balance endpoints answer: summaries, batches, layers, plans, figures over time."""

import os
import time

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import SkewedRun
from ultraep_serve.types import Decision, Policy


def test_balance_says_what_was_written(skewed_run: SkewedRun, client: TestClient) -> None:
    skewed_run.batch(0)
    skewed_run.batch(1, Decision.BALANCED)
    skewed_run.skip(Decision.SMALL)
    balance = client.get("/v1/balance").json()
    assert balance["schema_version"] == 3
    assert (balance["engine"], balance["mode"], balance["policy"]) == ("vllm", "tensor", "quota")
    assert (balance["num_ranks"], balance["window_records"]) == (2, 4)
    assert balance["batches"]["planned"] == 1
    assert balance["batches"]["skipped"]["balanced"] == 1
    assert balance["batches"]["skipped"]["small"] == 1
    assert balance["imbalance"]["before"] == {"mean": 2.0, "p50": 2.0, "p99": 2.0, "max": 2.0}
    assert balance["imbalance"]["after"]["max"] == 1.0
    assert balance["bytes_moved"] == 400
    assert [layer["records"] for layer in balance["layers"]] == [2, 2]
    rank = balance["ranks"][1]
    assert (rank["rank"], rank["pid"], rank["state"]) == (1, os.getpid(), "ready")
    assert (rank["alive"], rank["lost"], rank["missed"]) == (True, 0, 0)
    assert rank["assignments"] == {"before": 0, "after": 40, "mean": 40.0, "speed": 1.0}
    assert rank["stage_seconds"]["plan"] == pytest.approx(1e-6)


def test_a_benchmark_sees_only_its_own_requests(skewed_run: SkewedRun, client: TestClient) -> None:
    skewed_run.batch(0)
    since_ns = time.time_ns()
    skewed_run.batch(1)
    skewed_run.batch(2, Decision.FORCED, Policy.IDEAL)
    for policy, records in (("quota", 2), ("ideal", 2), ("off", 0)):
        parameters = {"since_ns": since_ns, "policy": policy}
        mine = client.get("/v1/balance", params=parameters).json()
        assert mine["window_records"] == records
    assert client.get("/v1/balance").json()["window_records"] == 4


def test_bad_parameters_are_422(skewed_run: SkewedRun, client: TestClient) -> None:
    for path in (
        "/v1/balance?policy=best",
        "/v1/balance?since_ns=-1",
        f"/v1/balance?since_ns={1 << 70}",
        "/v1/balance/batches?limit=0",
        "/v1/balance/layers/first",
    ):
        assert client.get(path).status_code == 422


def test_batches_and_layers(skewed_run: SkewedRun, client: TestClient) -> None:
    for number in range(5):
        skewed_run.batch(number)
    batches = client.get("/v1/balance/batches", params={"limit": 2}).json()["batches"]
    assert [batch["batch"] for batch in batches] == [4, 3]
    assert (batches[0]["layers"], batches[0]["bytes_moved"]) == ({"planned": 2}, 200)
    layer = client.get("/v1/balance/layers/1").json()
    assert (layer["layer"], layer["records"], layer["last"]["batch"]) == (1, 5, 4)
    assert layer["ranks"] == [
        {"before": 100, "after": 50, "mean": 50.0, "speed": 1.0},
        {"before": 0, "after": 50, "mean": 50.0, "speed": 1.0},
    ]
    assert client.get("/v1/balance/layers/2").status_code == 404


def test_a_plan_is_explained_down_to_the_expert(
    planned_run: SyntheticRun, client: TestClient
) -> None:
    planned_run.batch()
    layer = client.get("/v1/balance/layers/2").json()
    plan = layer["last"]
    assert (plan["decision"], plan["reason"]) == ("planned", "imbalanced")
    after = np.array(plan["expert_assignments"])
    assert after.sum() == sum(rank["before"] for rank in plan["ranks"])
    by_master = after.reshape(4, 8).sum(axis=1)
    assert by_master.tolist() == [rank["before"] for rank in plan["ranks"]]
    held = np.zeros(4, int)
    for replica in plan["replicas"]:
        assert replica["home_rank"] == replica["expert"] // 8 != replica["rank"]
        after[replica["expert"]] -= replica["assignments"]
        held[replica["rank"]] += replica["assignments"]
    computed = after.reshape(4, 8).sum(axis=1) + held
    assert computed.tolist() == [rank["after"] for rank in plan["ranks"]]
    assert len(plan["replicas"]) == layer["replicas"]["max"]
    assert sum(replica["bytes"] for replica in plan["replicas"]) == layer["bytes_moved"] > 0
    assert all(times["plan"] > 0 for times in plan["stage_seconds"])


def test_batches_come_in_pages(planned_run: SyntheticRun, client: TestClient) -> None:
    for _ in range(5):
        planned_run.batch()
    seen, before = [], None
    for _ in range(3):
        parameters = {"limit": 2} | ({"before": before} if before is not None else {})
        page = client.get("/v1/balance/batches", params=parameters).json()
        seen += [batch["batch"] for batch in page["batches"]]
        before = page["next_before"]
    assert seen == [5, 4, 3, 2, 1]
    assert before is None


def test_savings_and_floor(planned_run: SyntheticRun, client: TestClient) -> None:
    planned_run.batch()
    balance = client.get("/v1/balance").json()
    assert (balance["batches"]["planned"], balance["batches"]["skipped"]["small"]) == (1, 2)
    assert balance["floor"] == 1.0
    savings = balance["savings"]
    assert savings["saved_seconds"] > savings["spent_seconds"] > 0
    assert savings["net_seconds"] == pytest.approx(
        savings["saved_seconds"] - savings["spent_seconds"]
    )
    batch = client.get("/v1/balance/batches").json()["batches"][0]
    assert batch["avoided_seconds"] == pytest.approx(savings["saved_seconds"])


def test_the_heat_map_is_relative_to_each_layers_mean(
    planned_run: SyntheticRun, client: TestClient
) -> None:
    planned_run.batch()
    planned_run.batch()
    heat = client.get("/v1/balance/heatmap").json()
    assert heat["layers"] == [0, 1, 2]
    before = np.array(heat["before"])
    assert before.shape == (3, 4)
    assert before.mean(axis=1) == pytest.approx(1, abs=1e-3)
    assert np.max(heat["after"]) < before.max()


def test_history_has_a_step_for_every_batch_that_has_ended(
    planned_run: SyntheticRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_run.batch()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 10)  # the step that runs is left out
    history = client.get("/v1/balance/history").json()
    assert len(history["time_seconds"]) * history["step_seconds"] == 900
    (mean,) = (value for value in history["before_mean"] if value is not None)
    imbalance = client.get("/v1/balance").json()["imbalance"]
    assert mean == pytest.approx(imbalance["before"]["mean"])
    assert [value for value in history["after_max"] if value] == [imbalance["after"]["max"]]
