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


def test_loads_of_a_layer_begin_with_its_imbalance_wherever_that_is(
    tmp_path: Path, client: TestClient
) -> None:
    """Also where the busiest rank changes, so that all have the same load in the end."""
    run = SkewedRun(tmp_path)
    for number in range(4):
        run.batch(number, hot=number % 2)
    balance = client.get("/v1/balance").json()
    assert balance["imbalance"]["before"]["mean"] == 2.0
    assert [layer["load_before"] for layer in balance["layers"]] == [[2.0, 0.0]] * 2
    assert [layer["load_after"] for layer in balance["layers"]] == [[1.0, 1.0]] * 2
    run.close()


def test_history_has_the_steps_in_which_there_were_batches(
    planned_run: SyntheticRun, client: TestClient
) -> None:
    assert client.get("/v1/balance").json()["history"] == []
    planned_run.batch()
    balance = client.get("/v1/balance").json()
    (step,) = balance["history"]
    assert step["imbalance"] == balance["imbalance"]
    assert 0 <= balance["last_batch"]["time_ns"] / 1e9 - step["time_seconds"] < 5
