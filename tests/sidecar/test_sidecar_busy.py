"""Under more questions than can be answered: health is; and errors end no poll."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import SkewedRun
from ultraep_serve.sidecar import routes_balance
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.sidecar.store import Run, RunStore
from ultraep_serve.telemetry.ring import RingState

CLIENTS = 60  # more than there are threads


def test_health_is_answered_whatever_others_ask(
    tmp_path: Path, planned_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_run.batch()
    may_end, real = threading.Event(), routes_balance.batch_snapshots

    def slow(*arguments: Any) -> Any:
        may_end.wait(60)
        return real(*arguments)

    monkeypatch.setattr(routes_balance, "batch_snapshots", slow)

    async def ask() -> list[httpx.Response]:
        app = create_app(tmp_path, None)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            path = "/v1/balance/batches"
            others = [asyncio.create_task(client.get(path)) for _ in range(CLIENTS)]
            async with asyncio.timeout(60):
                health = [await client.get(path) for path in ("/healthz", "/readyz")]
            assert [answer.status_code for answer in health] == [200, 200]
            may_end.set()
            return await asyncio.gather(*others)

    assert {answer.status_code for answer in asyncio.run(ask())} == {200}


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
    with TestClient(create_app(tmp_path, None, options=options)) as client:
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
