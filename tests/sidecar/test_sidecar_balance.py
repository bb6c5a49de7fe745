"""What the balance endpoints answer: summaries, batches, layers, plans, figures over time."""

import time
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import SkewedRun
from ultraep_serve.types import Decision, Policy


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
    assert client.get("/v1/balance/layers/3").status_code == 404


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


def test_savings_are_net_of_costs(planned_run: SyntheticRun, client: TestClient) -> None:
    planned_run.batch()
    balance = client.get("/v1/balance").json()
    savings = balance["savings"]
    assert savings["saved_seconds"] > savings["spent_seconds"] > 0
    assert savings["net_seconds"] == pytest.approx(
        savings["saved_seconds"] - savings["spent_seconds"]
    )
    batch = client.get("/v1/balance/batches").json()["batches"][0]
    assert batch["avoided_seconds"] == pytest.approx(savings["saved_seconds"])


def test_the_heat_map_shows_the_imbalance_wherever_it_is(
    tmp_path: Path, client: TestClient
) -> None:
    """Also where the busiest rank changes, so that all have the same load in the end."""
    run = SkewedRun(tmp_path)
    for number in range(4):
        run.batch(number, hot=number % 2)
    heat = client.get("/v1/balance/heatmap").json()
    assert client.get("/v1/balance").json()["imbalance"]["before"]["mean"] == 2.0
    assert (heat["before"], heat["after"]) == ([[2.0, 0.0]] * 2, [[1.0, 1.0]] * 2)
    run.close()


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
    layers = client.get("/v1/balance").json()["layers"]
    means = [layer["imbalance"]["before"]["mean"] for layer in layers]
    assert before[:, 0] == pytest.approx(means, abs=1e-3)


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
