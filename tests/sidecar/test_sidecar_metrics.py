"""Metrics, as Prometheus scrapes them."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.ring_files import create, planned
from tests.support.sidecar_runs import SkewedRun, samples
from ultraep_serve.types import Decision, ExpertShape


def test_metrics_are_what_was_counted(skewed_run: SkewedRun, client: TestClient) -> None:
    skewed_run.batch(0)
    skewed_run.batch(1, Decision.BALANCED)
    skewed_run.skip(Decision.SMALL)
    found = samples(client)
    assert found["ultraep_ready"] == 1
    planned = "decision=planned,phase=prefill,reason=imbalanced"
    assert found[f"ultraep_batches_total,{planned}"] == 1
    assert found["ultraep_batches_total,decision=identity,phase=decode,reason=small"] == 1
    assert found["ultraep_layers_total,decision=identity,phase=prefill,reason=balanced"] == 2
    assert found["ultraep_moved_bytes_total"] == 400
    assert found["ultraep_replicas_total"] == 4
    assert found["ultraep_stage_seconds_total,stage=plan"] == pytest.approx(8e-6)
    assert found["ultraep_imbalance_ratio_count,phase=prefill,when=before"] == 4
    assert found["ultraep_imbalance_ratio_sum,phase=prefill,when=before"] == 8
    assert found["ultraep_imbalance_ratio_bucket,le=1.75,phase=prefill,when=before"] == 0
    assert found["ultraep_imbalance_ratio_bucket,le=2.0,phase=prefill,when=before"] == 4
    assert found["ultraep_imbalance_ratio_bucket,le=1.0,phase=prefill,when=after"] == 4
    assert found["ultraep_imbalance_floor_ratio"] == 1
    assert found["ultraep_policy_info,engine=vllm,mode=tensor,policy=quota"] == 1
    assert found["ultraep_rank_up,rank=1"] == 1
    assert found["ultraep_heartbeat_age_seconds,rank=0"] < 60
    assert 0 <= found["ultraep_last_batch_age_seconds,rank=0"] < 60
    assert found["ultraep_records_lost_total,rank=0"] == 0
    assert found["ultraep_slot_reserved_bytes"] == 2 << 20
    # 1 us of compute per record, its busiest rank at 20 before and 10 after
    assert found["ultraep_estimated_saved_seconds_total"] == pytest.approx(4e-6)
    # 5 stages on the busiest rank and the exchange, 1 us each, in 4 records
    assert found["ultraep_estimated_spent_seconds_total"] == pytest.approx(24e-6)


def test_a_clock_that_is_set_counts_nothing_twice(tmp_path: Path, client: TestClient) -> None:
    recorder = create(tmp_path, shape=ExpertShape(1, 4, 1), num_layers=1)
    for number, hour in enumerate((5, 4, 7, 6)):
        record = planned(number, load_before=[9], load_after=[9], slot_expert=-1)
        recorder.record_batch(record, 1, hour * 3600 * 10**9)
        found = samples(client)["ultraep_imbalance_ratio_count,phase=prefill,when=before"]
        assert found == number + 1
    recorder.close()


def test_openmetrics_where_the_scraper_asks_for_it(
    skewed_run: SkewedRun, client: TestClient
) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    answer = client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    for version in ("garbage", "", "-1", "1.0.0;escaping=garbage"):
        accept = {"Accept": f"application/openmetrics-text; version={version}"}
        assert "ultraep_ready 1" in client.get("/metrics", headers=accept).text
