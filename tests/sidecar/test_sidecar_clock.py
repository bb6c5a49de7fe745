"""The wall clock is set while a run goes on: no batch is lost, none is counted twice."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.ring_files import put
from tests.support.rings import PLANNED_LAYERS, SyntheticRun
from tests.support.sidecar_runs import SkewedRun, samples
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingState

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600
STEPS = {
    "back": [-10 * MINUTE],
    "ahead": [10 * MINUTE],
    "ahead-and-back": [2 * HOUR, -2 * HOUR],
    "a-day-back": [-DAY],
    "back-and-ahead": [-DAY, DAY],
}


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the wall clock of ranks and sidecar ahead, or back."""
    ahead, wall, wall_ns = [0], time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: wall() + ahead[0])
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + ahead[0] * 10**9)

    def step(seconds: int) -> None:
        ahead[0] += seconds

    return step


def counted(client: TestClient) -> dict[str, float]:
    """The batches that every answer with a window counts."""
    history = client.get("/v1/balance/history", params={"seconds": 60, "step": 1}).json()
    since = {"since_ns": time.time_ns() - MINUTE * 10**9}
    overview = client.get("/v1/overview", params={"seconds": 60}).json()
    layers = samples(client)["ultraep_imbalance_ratio_count,phase=prefill,when=after"]
    balance = client.get("/v1/balance", params=since).json()
    return {
        "history": sum(history["batches"]),
        "overview": overview["phases"]["prefill"]["batches"],
        "balance": balance["batches"]["planned"],
        "decode": balance["phases"]["decode"]["batches"] / 2,
        "list": len(client.get("/v1/balance/batches", params=since).json()["batches"]),
        "metrics": layers / PLANNED_LAYERS,
    }


def everywhere(batches: int) -> dict[str, float]:
    names = ("history", "overview", "balance", "decode", "list", "metrics")
    return dict.fromkeys(names, batches)


@pytest.mark.parametrize("steps", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("polled", [True, False], ids=["polled", "unpolled"])
def test_every_batch_counts_once(
    planned_run: SyntheticRun,
    client: TestClient,
    set_clock: Callable[[int], None],
    steps: list[int],
    polled: bool,
) -> None:
    planned_run.batch()
    assert counted(client) == everywhere(1)
    batches = 1
    for step in steps:
        planned_run.batch()  # under the old time, read under the new one unless polled
        if polled:
            assert counted(client) == everywhere(batches + 1)
        set_clock(step)
        planned_run.batch()
        batches += 2
        assert counted(client) == everywhere(batches)
    times = [b["time_ns"] for b in client.get("/v1/balance/batches").json()["batches"]]
    assert times == sorted(times, reverse=True)
    assert time.time_ns() - MINUTE * 10**9 < times[-1] <= times[0] <= time.time_ns()


@pytest.mark.parametrize("step", [-DAY, DAY], ids=["back", "ahead"])
def test_another_primary_rank_repeats_nothing(
    tmp_path: Path, client: TestClient, set_clock: Callable[[int], None], step: int
) -> None:
    run = SkewedRun(tmp_path)
    count = "ultraep_imbalance_ratio_count,phase=prefill,when=after"
    run.batch(0)
    assert samples(client)[count] == 2
    set_clock(step)
    run.batch(1)
    assert samples(client)[count] == 4
    run.recorders[0].set_state(RingState.FAILED)  # rank 1 is the primary one from now on
    assert samples(client)[count] == 4
    run.batch(2)
    assert samples(client)[count] == 6
    content = RunFiles(tmp_path).ring(1).read_bytes()
    put(RunFiles(tmp_path).ring(1), b"")
    assert samples(client)[count] == 6
    put(RunFiles(tmp_path).ring(1), content)
    assert samples(client)[count] == 6
    run.close()


def test_a_run_that_starts_before_the_last_one_ended_is_counted(
    tmp_path: Path, client: TestClient, set_clock: Callable[[int], None]
) -> None:
    """By a clock that was set back between them."""
    count = "ultraep_imbalance_ratio_count,phase=prefill,when=after"
    for layers in (4, 8):
        run: Any = SkewedRun(tmp_path)
        assert samples(client)["ultraep_ready"] == 1
        run.batch(0)
        run.batch(1)
        assert samples(client)[count] == layers
        run.recorders[0].set_state(RingState.FAILED)
        assert samples(client)[count] == layers
        run.close()
        set_clock(-DAY)


def test_a_sidecar_that_starts_later_orders_what_it_finds(
    tmp_path: Path, planned_run: SyntheticRun, set_clock: Callable[[int], None]
) -> None:
    planned_run.batch()
    set_clock(-HOUR)
    planned_run.batch()
    client = TestClient(create_app(tmp_path, None, False))
    assert counted(client)["history"] == counted(client)["list"] == 2
