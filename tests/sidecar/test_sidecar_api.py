"""The interface as such: its document, versions, pages, events, answers shared among clients."""

import asyncio
import gc
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.support.bench_fakes import serving
from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import Question, request
from ultraep_serve.sidecar import budget as budgets
from ultraep_serve.sidecar import routes_balance
from ultraep_serve.sidecar.answers import AnswerCache
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.sidecar.budget import Budget, OwnTime, Turns, cost_since, own_time
from ultraep_serve.sidecar.connections import server_settings
from ultraep_serve.sidecar.overview import RankList
from ultraep_serve.sidecar.statistics.held import NoRunError


def test_every_figure_is_explained(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "max/mean of assignments over ranks" in document["info"]["description"]
    obvious = {"layer", "ranks", "schema_version"}
    for name in ("ImbalanceSnapshot", "Savings", "BatchLayer", "Heatmap", "History", "Replica"):
        for field, described in schemas[name]["properties"].items():
            assert field in obvious or "description" in described, (name, field)
    for name, schema in schemas.items():
        assert schema.get("description") or "Error" in name, name


def test_answers_that_stand_alone_have_a_schema_version(
    planned_run: SyntheticRun, client: TestClient
) -> None:
    planned_run.batch()
    batch = "/v1/balance/batches/1"
    for path in (
        *("/v1/overview", "/v1/ranks", "/v1/config", "/readyz", "/v1/balance"),
        *("/v1/balance/heatmap", "/v1/balance/history", "/v1/balance/policies"),
        *("/v1/balance/batches", "/v1/balance/layers/0", batch, f"{batch}/layers/0"),
    ):
        assert client.get(path).json()["schema_version"] == 2


def test_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    settings = server_settings(create_app(tmp_path, None, False))
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        for path in ("/", "/docs", "/v1/config", "/static/main.js", "/nowhere", "/readyz"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "http" not in client.get("/").text.replace("http-equiv", "")
        assert "MIT License" in client.get("/static/vendor/uplot/LICENSE").text
        assert client.get("/static/../app.py").status_code == 404
        assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_events_are_pushed(tmp_path: Path, planned_run: SyntheticRun) -> None:
    planned_run.batch()
    app = create_app(tmp_path, None, False, options=AppOptions(event_seconds=0.01))
    sent: list[bytes] = []
    app.state.stopping = lambda: len(sent) > 3

    async def listen() -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, bytes]) -> None:
            sent.append(message.get("body", b""))

        await request(app, "/v1/events", receive, send)

    asyncio.run(listen())
    name, data, *_ = sent[1].decode().split("\n")
    assert name == "event: overview"
    assert json.loads(data.removeprefix("data: "))["last_batch"]["batch"] == 1


def test_no_more_listen_than_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask at the same moment, and again when those who listened have gone."""
    monkeypatch.setattr(routes_balance, "_MAX_LISTENERS", 4)
    app = create_app(tmp_path, None, False, options=AppOptions(event_seconds=0.01))

    async def listen(statuses: list[int], gone: asyncio.Event) -> None:
        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await request(app, "/v1/events", receive, send)

    async def ask() -> None:
        for _ in range(2):
            statuses, gone = list[int](), asyncio.Event()
            listening = [asyncio.create_task(listen(statuses, gone)) for _ in range(10)]
            async with asyncio.timeout(60):
                while len(statuses) < 10:
                    await asyncio.sleep(0.01)
            gone.set()
            await asyncio.gather(*listening)
            assert sorted(statuses) == [200] * 4 + [503] * 6

    asyncio.run(ask())


def test_answers_are_shared_for_a_moment() -> None:
    make = Question()

    async def ask() -> None:
        answers = AnswerCache(reuse_seconds=3600)
        assert await answers.encoded("a", make) == await answers.encoded("a", make)
        await answers.encoded("b", make)
        assert make.made == 2
        for key in range(100):
            await answers.encoded(key, make)
        await answers.encoded("a", make)  # has given way
        assert make.made == 103

    asyncio.run(ask())


def test_an_answer_is_made_anew_behind_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    make, passed, real = Question(waits_from=1), [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])

    async def ask() -> None:
        answers = AnswerCache(reuse_seconds=3600)
        first = await answers.encoded("a", make)
        passed[0] += 2000
        assert await answers.encoded("a", make) == first  # nobody waits
        assert await answers.encoded("a", make) == first
        make.may_end.set()
        async with asyncio.timeout(60):
            while await answers.encoded("a", make) == first:
                await asyncio.sleep(0.01)
        assert make.made == 2

    asyncio.run(ask())


def test_computing_takes_its_share_of_a_core() -> None:
    budget, now, spent = Budget(share=0.25, most=1.0), 100.0, 0.0
    while now < 200:
        if (pause := budget.pause(now)) > 1e-9:
            now += pause
            continue
        budget.spend(0.1)
        spent += 0.1
        now += 0.1
    assert 0.24 * 100 < spent < 1 + 0.25 * 100 + 0.1
    assert budget.pause(now + 1e6) == 0
    budget.spend(1.0)  # what was saved is not more than this
    assert budget.pause(now + 1e6) == 0
    budget.spend(0.5)
    assert budget.pause(now + 1e6) == pytest.approx(2.0)


def test_requests_wait_for_their_turn_and_operators_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes a second of a core, and a tenth of one may be taken."""
    taken, slept = itertools.count(), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(budgets, "own_time", lambda: OwnTime((next(taken) + 1) // 2, 0))
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def ask() -> None:
        turns = Turns(share=0.1)
        for path in ("/v1/balance", "/", "/v1/balance", "/readyz", "/v1/control/policy"):
            await turns.wait(path)

    asyncio.run(ask())
    assert slept == pytest.approx([1.5, 1.5, 0.5, 0.5])


@pytest.mark.parametrize(("waited", "cost"), [(0.0, 1.0), (0.5, 3.0), (4.0, 17.0), (9.0, 17.0)])
def test_waiting_for_a_core_costs_more_than_having_it(
    waited: float, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "own_time", lambda: OwnTime(3.0, 1.0 + waited))
    assert cost_since(OwnTime(2.0, 1.0)) == pytest.approx(cost)


def test_a_kernel_that_shows_no_waiting_shows_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_time().computed > 0
    monkeypatch.setattr(budgets, "_OWN_TIMES", tmp_path / "none")
    assert own_time().computed > 0
    assert own_time().waited == 0


@pytest.mark.parametrize("error", [NoRunError("the engine has ended"), OSError("too many files")])
def test_an_engine_that_ends_is_no_traceback(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither behind those who ask, nor where nobody waits for the answer any more."""
    passed, real, made = [0.0], time.monotonic, list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])

    def make() -> RankList:
        made.append(1)
        if len(made) > 1:
            raise error
        return RankList(ready=True, num_ranks=2, ranks=[])

    async def ask() -> None:
        answers = AnswerCache(reuse_seconds=3600)
        await answers.encoded("a", make)
        passed[0] += 2000
        await answers.encoded("a", make)
        gone = asyncio.create_task(answers.encoded("b", make))
        await asyncio.sleep(0)
        gone.cancel()
        async with asyncio.timeout(60):
            while answers._open:
                await asyncio.sleep(0.01)
        with pytest.raises(type(error)):  # what was known is not true any more
            await answers.encoded("a", make)
        del gone

    asyncio.run(ask())
    gc.collect()  # asyncio reports errors that nobody took
    assert not [record for record in caplog.records if record.exc_info]
    expected = 0 if isinstance(error, NoRunError) else 3
    assert len(caplog.records) == expected
