"""A sidecar on one of several hosts: loads of the whole group, health of its own ranks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.support.ring_files import create, write_all
from tests.support.sidecar_runs import BEARER, reasons, samples
from ultraep_serve.sidecar.figures import RankAssignments
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.types import Decision, ExpertShape, Policy, VerificationCheck

SHAPE = ExpertShape(num_ranks=4, num_logical_experts=8, num_replica_slots=1)
BEFORE, AFTER = [60, 0, 10, 10], [30, 30, 10, 10]


class Host:
    """The rings and page of two ranks of four; weights move between two ranks."""

    def __init__(self, path: Path, first: int) -> None:
        self.ranks = range(first, first + 2)
        self.page = ControlPage.create(path, Policy.QUOTA)
        self.recorders = [
            create(
                path,
                shape=SHAPE,
                rank=rank,
                num_layers=1,
                location=Location(rank, 4, 2, 2, "one"),
            )
            for rank in self.ranks
        ]
        for recorder in self.recorders:
            recorder.set_policy(Policy.QUOTA)
            recorder.set_state(RingState.READY)

    def batch(self, policy: Policy = Policy.QUOTA) -> None:
        if policy is Policy.OFF:
            for recorder in self.recorders:
                recorder.count_batch(Decision.POLICY_OFF)
            return
        slots = np.array([[-1], [0], [-1], [-1]])
        loads = {"load_before": np.array(BEFORE), "load_after": np.array(AFTER)}
        first = self.ranks.start
        write_all(self.recorders, 1, first=first, policy=policy, slot_expert=slots, **loads)


@pytest.fixture(params=[0, 2], ids=["first", "second"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, request.param)
    made.batch()
    yield made
    for recorder in made.recorders:
        recorder.close()
    made.page.close()


def test_loads_are_everybodys_and_ranks_are_this_hosts(host: Host, client: TestClient) -> None:
    balance = client.get("/v1/balance").json()
    assert balance["num_ranks"] == 4
    assert balance["imbalance"]["before"]["mean"] == 3.0
    assert balance["imbalance"]["after"]["mean"] == balance["floor"] == 1.5  # 30 of a mean of 20
    assert [layer["floor"] for layer in balance["layers"]] == [1.5]
    assert client.get("/v1/balance/layers/0").json()["floor"] == 1.5
    assert [rank["rank"] for rank in balance["ranks"]] == list(host.ranks)
    for rank in balance["ranks"]:
        number = rank["rank"]
        own = RankAssignments(before=BEFORE[number], after=AFTER[number], mean=20.0)
        assert rank["assignments"] == own.model_dump()
        assert rank["bytes_sent"] == 100 * number
    assert balance["bytes_moved"] == 100 * sum(host.ranks)
    plan = client.get("/v1/balance/layers/0").json()["last"]
    assert [rank["before"] for rank in plan["ranks"]] == BEFORE


def test_readiness_is_that_of_this_hosts_ranks(host: Host, client: TestClient) -> None:
    assert reasons(client) == {}
    host.recorders[1].set_state(RingState.FAILED)
    assert list(reasons(client)) == [str(host.ranks[1])]
    found = samples(client)
    assert found["ultraep_ready"] == 0
    assert found["ultraep_imbalance_floor_ratio"] == 1.5
    assert {name for name in found if name.startswith("ultraep_rank_up")} == {
        f"ultraep_rank_up,rank={rank}" for rank in host.ranks
    }


def test_only_the_first_host_decides_and_the_others_say_who(host: Host, client: TestClient) -> None:
    answer = client.post("/v1/control/policy", json={"policy": "off"}, headers=BEARER)
    if host.ranks[0] == 0:
        assert answer.status_code == 200
        assert host.page.policy is Policy.OFF
        return
    assert answer.status_code == 409
    assert "on the first host, one: ask the sidecar there" in answer.json()["detail"]
    assert host.page.policy is Policy.QUOTA


def test_other_hosts_than_the_first_learn_policy_and_doubt_from_their_ranks(
    host: Host, client: TestClient
) -> None:
    """Their own control page says nothing about it."""
    is_first = host.ranks[0] == 0
    host.recorders[1].count_verification_failure(VerificationCheck.ANSWERS)
    assert client.get("/readyz").json()["status"] == "ready"
    host.batch(Policy.OFF)
    assert client.get("/v1/balance").json()["policy"] == ("quota" if is_first else "off")
    assert client.get("/readyz").json()["status"] == ("ready" if is_first else "unbalanced")
