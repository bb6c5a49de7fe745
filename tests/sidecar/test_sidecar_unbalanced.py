"""A server that could not be balanced and runs all the same says so everywhere."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import BEARER, samples
from ultraep_serve.cli import main
from ultraep_serve.sidecar.direct import status

REASON = "layer 3 has an expert tensor that cannot be moved"


def unbalance(run_path: Path) -> None:
    (run_path / "unbalanced").write_text(f"{REASON}\n")


def test_every_answer_says_it(tmp_path: Path, client: TestClient) -> None:
    assert client.get("/readyz").json()["status"] == "not ready"
    assert samples(client)["ultraep_unbalanced"] == 0
    unbalance(tmp_path)
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "unbalanced")
    assert REASON in ready.json()["reasons"]["run"]
    balance = client.get("/v1/balance")
    assert balance.status_code == 503
    assert (balance.json()["status"], balance.json()["reason"]) == ("unbalanced", REASON)
    assert samples(client) == {"ultraep_unbalanced": 1}
    assert client.get("/v1/config").status_code == 200
    answer = client.post("/v1/control/policy", json={"policy": "off"}, headers=BEARER)
    assert answer.status_code == 409


def test_rings_of_ranks_that_gave_up_change_nothing(
    tmp_path: Path, planned_run: SyntheticRun, client: TestClient
) -> None:
    planned_run.batch()
    assert client.get("/readyz").json()["status"] == "ready"
    unbalance(tmp_path)
    assert client.get("/readyz").json()["status"] == "unbalanced"
    assert client.get("/v1/balance").status_code == 503


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n\n", b"a" * 100_000])
def test_any_content_is_shown(tmp_path: Path, client: TestClient, content: bytes) -> None:
    (tmp_path / "unbalanced").write_bytes(content)
    assert client.get("/readyz").json()["status"] == "unbalanced"
    assert 0 < len(client.get("/v1/balance").json()["reason"]) < 10_000


def test_status_says_it_and_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unbalance(tmp_path)
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    assert REASON in " ".join(capsys.readouterr().out.split())
    assert status(run_dir=tmp_path)["reason"] == REASON
