"""The self-check and samples in service, wherever the sidecar and `status` show them."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import BEARER, SkewedRun, samples
from ultraep_serve.cli import main
from ultraep_serve.costs.model import CostModel
from ultraep_serve.sidecar.status import status_reader
from ultraep_serve.telemetry.ring import SelfCheck, SelfCheckOutcome
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import CheckResult, VerificationCheck

CHECKS = CheckResult("kernels", 0.5, "64 loads"), CheckResult("costs", 2.5, "a copy: 1 ms", "far")
PASSED = SelfCheck(SelfCheckOutcome.PASSED, CHECKS)


@pytest.fixture
def verified_run(planned_run: SyntheticRun) -> SyntheticRun:
    """Four ranks that have passed; three layers are verified, on rank 1 one fewer."""
    for rank, recorder in enumerate(planned_run.recorders):
        recorder.set_self_check(PASSED)
        for check in (VerificationCheck.SLOTS, VerificationCheck.PLANS):
            for _ in range(2 if rank == 1 else 3):
                recorder.count_verified(check, 500_000_000)
    planned_run.batch()
    return planned_run


def fail(run: SyntheticRun) -> None:
    """Rank 2 finds wrong bytes; rank 0 switches off."""
    run.recorders[2].count_verification_failure(VerificationCheck.SLOTS)
    run.control.switch_off_in_doubt()


def test_what_passed_is_in_every_answer(verified_run: SyntheticRun, client: TestClient) -> None:
    assert client.get("/readyz").json()["status"] == "ready"
    answer = client.get("/v1/balance").json()
    assert (answer["self_check"]["result"], answer["self_check"]["seconds"]) == ("passed", 3.0)
    assert answer["self_check"]["checks"] == [
        {"name": "kernels", "seconds": 0.5, "detail": "64 loads", "warning": ""},
        {"name": "costs", "seconds": 2.5, "detail": "a copy: 1 ms", "warning": "far"},
    ]
    verified = answer["verification"]
    assert (verified["layers"], verified["failures"], verified["switched_off"]) == (3, 0, False)
    assert verified["by_check"]["slots"] == {"layers": 3, "failures": 0}
    assert verified["by_check"]["answers"] == {"layers": 0, "failures": 0}
    assert verified["seconds"] == 3.0
    found = samples(client)
    assert found["ultraep_verified_layers_total,check=slots"] == 3
    assert found["ultraep_verification_failures_total,check=slots"] == 0
    assert found["ultraep_switched_off"] == 0


def test_costs_are_in_the_answer_that_status_prints(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    planned_run.batch()
    assert client.get("/v1/balance").json()["costs"] is None
    costs = CostModel(1e-5, bytes_per_expert=10**6, link_bytes_per_second=1e10)
    RunFiles(tmp_path).write_costs(costs)
    assert CostModel.from_mapping(client.get("/v1/balance").json()["costs"]) == costs
    (tmp_path / "costs.json").write_text('{"seconds_per_assignment": -1}')
    assert client.get("/v1/balance").json()["costs"] is None


def test_a_failed_sample_is_said_until_a_policy_is_set(
    verified_run: SyntheticRun, client: TestClient
) -> None:
    fail(verified_run)
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "unbalanced")
    assert "rank 2: slots" in ready.json()["reasons"]["run"]
    balance = client.get("/v1/balance").json()
    assert balance["policy"] == "off"
    assert balance["verification"]["by_check"]["slots"]["failures"] == 1
    assert samples(client)["ultraep_switched_off"] == 1
    for refused in ({"policy": "ideal"}, {"policy": "pause"}, {}):
        assert not client.post("/v1/control/policy", json=refused, headers=BEARER).is_success
    for path in ("pause", "resume"):
        client.post(f"/v1/control/{path}", headers=BEARER)
    assert client.get("/readyz").json() == ready.json()
    client.post("/v1/control/policy", json={"policy": "quota"}, headers=BEARER)
    assert client.get("/readyz").json()["status"] == "ready"
    found = samples(client)
    assert found["ultraep_switched_off"] == 0
    assert found["ultraep_verification_failures_total,check=slots"] == 1


def test_a_dead_rank_weighs_more_than_doubt(verified_run: SyntheticRun, client: TestClient) -> None:
    fail(verified_run)
    verified_run.recorders[3].fail("lost")
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")


def test_one_rank_that_failed_is_what_is_shown(skewed_run: SkewedRun, client: TestClient) -> None:
    first, second = skewed_run.recorders
    first.set_self_check(PASSED)
    assert client.get("/v1/balance").json()["self_check"]["result"] is None
    second.set_self_check(SelfCheck(SelfCheckOutcome.FAILED, CHECKS[:1]))
    found = client.get("/v1/balance").json()["self_check"]
    assert (found["result"], len(found["checks"])) == ("failed", 1)


def test_status_says_it(
    tmp_path: Path, verified_run: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["status", "--run-dir", str(tmp_path)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "self-check passed in 3.0 s; verified 3 layers, 0 failed" in shown
    assert "costs: far" in shown
    fail(verified_run)
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "switched itself off" in shown
    assert "verified 3 layers, 1 failed" in shown
    document = status_reader(run_dir=tmp_path)().document
    assert document["verification"]["switched_off"]
