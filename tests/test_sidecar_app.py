"""What the endpoints answer, over rings written by real recorders."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from ultraep_serve.config import BalanceConfig
from ultraep_serve.observability import ControlPage, Recorder, RingState, ring_path
from ultraep_serve.sidecar import create_app
from ultraep_serve.sidecar.app import SidecarSettings
from ultraep_serve.types import Decision, ExpertShape, Policy

TOKEN = "open-sesame"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Run:
    """Recorders of a small run; every rank writes the same loads, rank r sends r * 100 bytes."""

    def __init__(self, run_path: Path, num_ranks: int = 2, ring_records: int = 256) -> None:
        self.num_ranks = num_ranks
        shape = ExpertShape(num_ranks, 4 * num_ranks, 1)
        self.recorders = [
            Recorder.create(run_path, rank, shape, 2, ring_records, "vllm", "tensor", 1 << 20, 30.0)
            for rank in range(num_ranks)
        ]
        for recorder in self.recorders:
            recorder.set_state(RingState.READY)

    def batch(
        self,
        number: int,
        decision: Decision = Decision.PLANNED,
        policy: Policy = Policy.QUOTA,
    ) -> None:
        """Two layers, all assignments on rank 0 before, even after."""
        before = np.zeros(self.num_ranks)
        before[0] = 10 * self.num_ranks
        for layer in range(2):
            for rank, recorder in enumerate(self.recorders):
                recorder.record(
                    layer=layer,
                    batch=number,
                    tokens=10,
                    decision=decision,
                    policy=policy,
                    replicas=1,
                    bytes_sent=100 * rank,
                    bytes_received=50,
                    verb_ns=[1000] * 7,
                    load_before=before,
                    load_after=np.full(self.num_ranks, 10),
                    slot_expert=None,
                )

    def skip(self, decision: Decision) -> None:
        for recorder in self.recorders:
            recorder.count_batch(decision)

    def close(self) -> None:
        for recorder in self.recorders:
            recorder.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return TestClient(create_app(tmp_path, TOKEN, False))


def reasons(client: TestClient) -> dict[str, str]:
    answer = client.get("/readyz")
    assert answer.status_code == (503 if answer.json()["reasons"] else 200)
    found: dict[str, str] = answer.json()["reasons"]
    return found


def test_balance_says_what_was_written(run: Run, client: TestClient) -> None:
    run.batch(0)
    run.batch(1, Decision.BALANCED)
    run.skip(Decision.SMALL)
    balance = client.get("/v1/balance").json()
    assert balance["schema_version"] == 1
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
    assert (rank["alive"], rank["lost"], rank["records"]) == (True, 0, 4)
    assert rank["assignments"] == {"before": 0, "after": 40}
    assert rank["verb_seconds"]["plan"]["mean"] == pytest.approx(1e-6)


def test_a_benchmark_sees_only_its_own_requests(run: Run, client: TestClient) -> None:
    run.batch(0)
    run.skip(Decision.SMALL)
    client.get("/healthz")
    client.get("/v1/balance")  # as the poller would
    since_ns = time.time_ns()
    run.batch(1)
    run.batch(2, Decision.FORCED, Policy.IDEAL)
    run.skip(Decision.POLICY_OFF)
    mine = client.get("/v1/balance", params={"since_ns": since_ns, "policy": "quota"}).json()
    assert mine["window_records"] == 2
    assert (mine["batches"]["planned"], mine["batches"]["skipped"]["forced"]) == (1, 0)
    assert mine["batches"]["skipped"]["small"] == 0
    assert mine["batches"]["skipped"]["policy_off"] == 1
    ideal = client.get("/v1/balance", params={"since_ns": since_ns, "policy": "ideal"}).json()
    assert (ideal["window_records"], ideal["batches"]["skipped"]["forced"]) == (2, 1)


def test_every_policy_has_a_balance(run: Run, client: TestClient) -> None:
    run.batch(0, policy=Policy.EPLB)
    run.batch(1)
    for policy, records in (("eplb", 2), ("quota", 2), ("off", 0), ("ideal", 0)):
        balance = client.get("/v1/balance", params={"policy": policy}).json()
        assert balance["window_records"] == records
    assert client.get("/v1/balance").json()["window_records"] == 4


def test_bad_parameters_are_422(run: Run, client: TestClient) -> None:
    for path in (
        "/v1/balance?policy=best",
        "/v1/balance?since_ns=-1",
        f"/v1/balance?since_ns={1 << 70}",
        "/v1/balance/batches?limit=0",
        "/v1/balance/layers/first",
    ):
        assert client.get(path).status_code == 422


def test_batches_and_layers(run: Run, client: TestClient) -> None:
    for number in range(5):
        run.batch(number)
    batches = client.get("/v1/balance/batches", params={"limit": 2}).json()["batches"]
    assert [batch["batch"] for batch in batches] == [4, 3]
    assert (batches[0]["layers"], batches[0]["bytes_moved"]) == ({"planned": 2}, 200)
    layer = client.get("/v1/balance/layers/1").json()
    assert (layer["layer"], layer["records"], layer["last_batch"]) == (1, 5, 4)
    assert layer["ranks"] == [{"before": 100, "after": 50}, {"before": 0, "after": 50}]
    assert client.get("/v1/balance/layers/2").status_code == 404


def test_before_the_engine_only_health_is_well(client: TestClient) -> None:
    assert client.get("/healthz").status_code == 200
    assert client.get("/").status_code == 200
    assert client.get("/metrics").status_code == 200
    assert client.get("/v1/config").json()["config"] is None
    assert "run" in reasons(client)
    for path in ("/v1/balance", "/v1/balance/batches", "/v1/balance/layers/0"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert "engine" in answer.json()["detail"]


def test_ready_only_when_every_rank_is(tmp_path: Path, run: Run, client: TestClient) -> None:
    assert reasons(client) == {}
    run.recorders[1].set_state(RingState.FAILED)
    assert reasons(client) == {"1": "state is failed"}
    run.recorders[1].set_state(RingState.READY)
    ring_path(tmp_path, 1).unlink()
    assert "gone" in reasons(client)["1"]
    assert client.get("/v1/balance").json()["ranks"][1]["state"] == "missing"


def test_an_engine_that_comes_back_is_followed(tmp_path: Path, client: TestClient) -> None:
    first = Run(tmp_path)
    first.batch(0)
    first.batch(1)
    first.skip(Decision.SMALL)
    assert client.get("/v1/balance").json()["window_records"] == 4
    first.close()
    assert reasons(client) == {"0": "state is stopped", "1": "state is stopped"}
    for rank in (0, 1):
        ring_path(tmp_path, rank).unlink()
    assert client.get("/v1/balance").status_code == 503
    second = Run(tmp_path, num_ranks=3)
    second.batch(0)
    assert reasons(client) == {}
    balance = client.get("/v1/balance").json()
    assert (balance["num_ranks"], balance["window_records"]) == (3, 2)
    assert balance["imbalance"]["before"]["max"] == 3.0
    assert balance["batches"]["planned"] == 1
    assert balance["batches"]["skipped"]["small"] == 0
    second.close()


def test_hostile_files_are_reported_and_survived(
    tmp_path: Path, run: Run, client: TestClient
) -> None:
    run.batch(0)
    ring_path(tmp_path, 0).unlink()
    ring_path(tmp_path, 0).write_bytes(b"UEPRING\x01" + bytes(range(256)) * 40)
    os.mkfifo(tmp_path / "ring-7")
    (tmp_path / "ring-08").mkdir()
    (tmp_path / "ring-x").write_text("x")
    (tmp_path / "control").write_bytes(b"\xff" * 8192)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "schema version" in reasons(client)["0"]
    balance = client.get("/v1/balance").json()  # rank 1 leads
    assert (balance["window_records"], balance["ranks"][0]["state"]) == (2, "missing")
    assert client.get("/v1/config").json()["config"] is None
    assert client.get("/metrics").status_code == 200
    ring_path(tmp_path, 1).unlink()
    ring_path(tmp_path, 1).write_bytes(b"")
    assert set(reasons(client)) == {"0", "1", "7"}


def samples(client: TestClient, path: str = "/metrics") -> dict[str, float]:
    """Sample values by name and labels, as a scraper reads them."""
    text = client.get(path).text
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_what_was_counted(run: Run, client: TestClient) -> None:
    run.batch(0)
    run.batch(1, Decision.BALANCED)
    run.skip(Decision.SMALL)
    found = samples(client)
    assert found["ultraep_ready"] == 1
    planned = "decision=planned,phase=prefill,reason=imbalanced"
    assert found[f"ultraep_batches_total,{planned}"] == 1
    assert found["ultraep_batches_total,decision=identity,phase=decode,reason=small"] == 1
    assert found["ultraep_layers_total,decision=identity,phase=prefill,reason=balanced"] == 2
    assert found["ultraep_moved_bytes_total"] == 400
    assert found["ultraep_replicas_total"] == 4
    assert found["ultraep_verb_seconds_total,verb=plan"] == pytest.approx(8e-6)
    assert found["ultraep_imbalance_ratio_count,phase=prefill,stage=before"] == 4
    assert found["ultraep_imbalance_ratio_sum,phase=prefill,stage=before"] == 8
    assert found["ultraep_imbalance_ratio_bucket,le=1.75,phase=prefill,stage=before"] == 0
    assert found["ultraep_imbalance_ratio_bucket,le=2.0,phase=prefill,stage=before"] == 4
    assert found["ultraep_imbalance_ratio_bucket,le=1.0,phase=prefill,stage=after"] == 4
    assert found["ultraep_imbalance_floor_ratio"] == 1
    assert found["ultraep_policy_info,engine=vllm,mode=tensor,policy=quota"] == 1
    assert found["ultraep_rank_up,rank=1"] == 1
    assert found["ultraep_heartbeat_age_seconds,rank=0"] < 60
    assert 0 <= found["ultraep_last_batch_age_seconds,rank=0"] < 60
    assert found["ultraep_records_lost_total,rank=0"] == 0
    assert found["ultraep_slot_reserved_bytes"] == 2 << 20
    # 1 us of compute per record, its busiest rank at 20 before and 10 after
    assert found["ultraep_estimated_saved_seconds_total"] == pytest.approx(4e-6)
    # 5 verbs on the busiest rank and the exchange, 1 us each, in 4 records
    assert found["ultraep_estimated_spent_seconds_total"] == pytest.approx(24e-6)


def test_series_by_layer_and_rank_come_on_request(run: Run, client: TestClient) -> None:
    run.batch(0)
    name = "ultraep_layer_imbalance_ratio,layer=1,stage=before"
    assert name not in samples(client)
    found = samples(client, "/metrics?detail=true")
    assert found[name] == 2
    assert found["ultraep_rank_assignments_ratio,rank=0,stage=before"] == 2
    assert found["ultraep_rank_assignments_ratio,rank=1,stage=after"] == 1
    assert found["ultraep_rank_sent_bytes_total,rank=1"] == 200
    assert found["ultraep_rank_received_bytes_total,rank=0"] == 100
    assert found["ultraep_rank_verb_seconds_total,rank=0,verb=plan"] == pytest.approx(2e-6)
    assert found["ultraep_ready"] == 1


def test_every_family_is_explained(run: Run, client: TestClient) -> None:
    run.batch(0)
    families = list(text_string_to_metric_families(client.get("/metrics?detail=true").text))
    assert len(families) > 15
    assert all(f.name.startswith("ultraep_") and f.documentation.endswith(".") for f in families)


def test_the_histogram_outlives_a_change_of_lead(
    tmp_path: Path, run: Run, client: TestClient
) -> None:
    run.batch(0)
    assert samples(client)["ultraep_imbalance_ratio_count,phase=prefill,stage=after"] == 2
    run.recorders[0].set_state(RingState.FAILED)  # rank 1 leads, with the same loads
    assert client.get("/v1/balance").json()["window_records"] == 2
    run.batch(1)
    assert samples(client)["ultraep_imbalance_ratio_count,phase=prefill,stage=after"] == 4


def test_openmetrics_where_the_scraper_asks_for_it(run: Run, client: TestClient) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_config_shows_the_settings_and_no_secret(
    tmp_path: Path, run: Run, client: TestClient
) -> None:
    settings = json.loads(BalanceConfig(num_replica_slots=3).to_json())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "control_token": TOKEN}))
    answer = client.get("/v1/config")
    assert answer.json()["config"]["num_replica_slots"] == 3
    assert answer.json()["schema_version"] == 1
    assert TOKEN not in answer.text


def test_the_policy_is_switched_by_who_has_the_token(
    tmp_path: Path, run: Run, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = {"policy": "off"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = client.post("/v1/control/policy", json=body, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert engine.policy is Policy.QUOTA
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    wanted = {"policy": "off", "sequence": 1, "schema_version": 1}
    assert (answer.status_code, answer.json()) == (200, wanted)
    assert engine.policy is Policy.OFF
    assert client.get("/v1/config").json()["policy"] == "off"
    assert client.get("/v1/balance").json()["policy"] == "off"
    for wrong in ({"policy": "best"}, {}, {"policy": "off", "for": "ever"}, None):
        assert client.post("/v1/control/policy", json=wrong, headers=BEARER).status_code == 422
    assert client.get("/v1/control/policy").status_code == 405
    engine.close()


def test_the_ideal_policy_needs_permission(tmp_path: Path, run: Run, client: TestClient) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    body = {"policy": "ideal"}
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    assert answer.status_code == 403
    assert "--allow-ideal" in answer.json()["detail"]
    assert engine.policy is Policy.QUOTA
    allowed = TestClient(create_app(tmp_path, TOKEN, True))
    assert allowed.post("/v1/control/policy", json=body, headers=BEARER).status_code == 200
    assert engine.policy is Policy.IDEAL
    engine.close()


def test_without_a_token_or_a_page_nothing_is_switched(tmp_path: Path, client: TestClient) -> None:
    body = {"policy": "off"}
    answer = client.post("/v1/control/policy", json=body, headers=BEARER)
    assert answer.status_code == 409
    assert "--policy off" in answer.json()["detail"]
    closed = TestClient(create_app(tmp_path, "", False))
    empty = {"Authorization": "Bearer "}
    assert closed.post("/v1/control/policy", json=body, headers=empty).status_code == 403


def beat(run_path: Path, rank: int) -> None:
    Recorder.create(
        run_path, rank, ExpertShape(1, 4, 1), 2, 16, "vllm", "tensor", 0, 30.0
    ).set_state(RingState.READY)
    time.sleep(600)


def wait_for(client: TestClient, text: str) -> None:
    while text not in str(reasons(client)):
        time.sleep(0.05)


def test_a_killed_writer_is_noticed(tmp_path: Path) -> None:
    settings = SidecarSettings(poll_seconds=0.05, heartbeat_limit_seconds=1.5)
    writer = multiprocessing.get_context("spawn").Process(target=beat, args=(tmp_path, 0))
    with TestClient(create_app(tmp_path, TOKEN, False, settings=settings)) as client:
        writer.start()
        try:
            wait_for(client, "{}")
        finally:
            writer.kill()
            writer.join()
        wait_for(client, "has died")
        assert client.get("/v1/balance").json()["ranks"][0]["alive"] is False
        assert samples(client)["ultraep_rank_up,rank=0"] == 0


def test_the_background_keeps_what_the_ring_forgets(tmp_path: Path) -> None:
    run = Run(tmp_path, ring_records=16)
    settings = SidecarSettings(poll_seconds=0.001, max_records=20)
    client = TestClient(create_app(tmp_path, TOKEN, False, settings=settings))
    for number in range(30):  # 60 records through a ring of 16 and a window of 20
        run.batch(number)
        client.get("/readyz")
    assert client.get("/v1/balance").json()["window_records"] >= 20
    assert client.get("/v1/balance").json()["batches"]["planned"] == 30
    found = samples(client)
    assert found["ultraep_records_missed_total,rank=0"] == 0
    assert found["ultraep_imbalance_ratio_count,phase=prefill,stage=before"] == 60
    run.close()
