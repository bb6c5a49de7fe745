"""Under more questions than can be answered: health is; and errors end no poll."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from tests.support.sidecar_runs import SkewedRun
from ultraep_serve.sidecar import routes
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.sidecar.store import Run, RunStore

CLIENTS = 60  # more than there are threads


def test_health_is_answered_whatever_others_ask(
    tmp_path: Path, planned_run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_run.batch()
    may_end, real = threading.Event(), routes.batch_list

    def slow(*arguments: Any) -> Any:
        may_end.wait(60)
        return real(*arguments)

    monkeypatch.setattr(routes, "batch_list", slow)

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


def test_the_thread_that_polls_survives_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, thrice = [0], threading.Event()

    def fail(_: RunStore) -> Run:
        calls[0] += 1
        if calls[0] == 3:
            thrice.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(RunStore, "poll", fail)
    options = AppOptions(poll_seconds=0.001)
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

    with monkeypatch.context() as patches:
        patches.setattr("os.open", fail)
        patches.setattr("os.listdir", fail)
        assert store.poll().readable is not None
    assert store.poll().problems == {}
