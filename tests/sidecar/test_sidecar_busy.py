"""Under more questions than can be answered: health is, and so are those who wait their turn."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import Question, SkewedRun
from ultraep_serve.sidecar import routes_balance
from ultraep_serve.sidecar.answers import AnswerCache
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.sidecar.store import Run, RunStore
from ultraep_serve.telemetry.schema import RingState

CLIENTS, OPEN = 60, 32  # more clients than any thread pool here has threads


def test_health_and_metrics_are_answered_whatever_others_ask(
    tmp_path: Path, planned_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_run.batch()
    may_end, running, most = threading.Event(), [0], [0]
    lock, real = threading.Lock(), routes_balance.batch_snapshots

    def slow(*arguments: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        may_end.wait(60)
        with lock:
            running[0] -= 1
        return real(*arguments)

    monkeypatch.setattr(routes_balance, "batch_snapshots", slow)

    async def ask() -> tuple[list[int], list[httpx.Response]]:
        options = AppOptions(reuse_seconds=0.5, heartbeat_limit_seconds=3600)
        app = create_app(tmp_path, None, False, options=options)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            assert (await client.get("/readyz")).status_code == 200
            path = "/v1/balance/batches"
            attack = [
                asyncio.create_task(client.get(path, params={"limit": 1000, "since_ns": number}))
                for number in range(CLIENTS)
            ]
            await asyncio.wait(attack, return_when=asyncio.FIRST_COMPLETED)  # some are refused
            async with asyncio.timeout(60):
                health = [
                    (await client.get(path)).status_code
                    for path in ("/healthz", "/readyz", "/metrics", "/v1/config", "/v1/ranks")
                ]
                while most[0] < 2:  # the second thread may still be starting
                    await asyncio.sleep(0.01)
            may_end.set()
            return health, await asyncio.gather(*attack)

    health, answers = asyncio.run(ask())
    assert health == [200] * 5
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(refused) == CLIENTS - OPEN
    for answer in refused:
        assert answer.headers["retry-after"] == "1"
        assert "ask again" in answer.json()["detail"]
    assert sum(answer.status_code == 200 for answer in answers) == OPEN
    assert most[0] == 2


def test_one_question_of_many_clients_is_one_question() -> None:
    make = Question(waits_from=0)

    async def ask() -> list[bytes]:
        answers = AnswerCache(reuse_seconds=3600, at_once=2)
        asked = [asyncio.create_task(answers.encoded("a", make)) for _ in range(CLIENTS)]
        await asyncio.sleep(0)
        asked[0].cancel()  # one that goes away takes nobody along
        make.may_end.set()
        return await asyncio.gather(*asked[1:])

    assert len(set(asyncio.run(ask()))) == 1
    assert make.made == 1


def test_who_was_refused_is_answered_later() -> None:
    make = Question(waits_from=0)

    async def ask() -> None:
        answers = AnswerCache(reuse_seconds=0.0)
        asked = [asyncio.create_task(answers.encoded(number, make)) for number in range(OPEN)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="503"):
            await answers.encoded("late", make)
        make.may_end.set()
        await asyncio.gather(*asked)
        await answers.encoded("late", make)

    asyncio.run(ask())


def elsewhere(call: Callable[[], Any]) -> Any:
    """What ``call`` returns in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits"
    return found[0]


def test_readiness_waits_for_nobody(tmp_path: Path, skewed_run: SkewedRun) -> None:
    store = RunStore(tmp_path)
    with store._lock:  # as a long computation holds it
        assert "not read yet" in elsewhere(store.readiness).problems["run"]
    assert elsewhere(store.readiness).problems == {}
    skewed_run.recorders[1].set_state(RingState.FAILED)
    with store._lock:
        assert elsewhere(store.readiness).problems == {}
        store.run = replace(store.run, read_at=-1e9)
        assert "were not read for" in elsewhere(store.readiness).problems["run"]
    assert elsewhere(store.readiness).problems == {"1": "state is failed"}


def test_the_thread_that_polls_survives_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls, thrice = [0], threading.Event()

    def fail(_: Run) -> None:
        calls[0] += 1
        if calls[0] == 3:
            thrice.set()
        raise OSError(24, "Too many open files")

    options = AppOptions(poll_seconds=0.001, after_poll=fail)
    with TestClient(create_app(tmp_path, None, False, options=options)) as client:
        assert thrice.wait(60)
        assert client.get("/healthz").status_code == 200
    assert sum("Too many open files" in record.getMessage() for record in caplog.records) == 1


def test_polls_survive_a_process_without_descriptors(
    tmp_path: Path, skewed_run: SkewedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(tmp_path)
    store.poll()

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(24, "Too many open files")

    store.run = replace(store.run, unbalanced="it could not be balanced")
    with monkeypatch.context() as patches:
        patches.setattr("os.open", fail)
        patches.setattr("os.listdir", fail)
        assert store.poll().unbalanced == "it could not be balanced"
    store.run = replace(store.run, unbalanced="")
    assert store.poll().problems == {}
