"""The interface as such: its document, versions, pages, events, answers shared among clients."""

import asyncio
import json
import threading
from pathlib import Path

from fastapi.testclient import TestClient

from tests.support.rings import SyntheticRun
from ultraep_serve.sidecar.answers import AnswerCache
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.sidecar.health import RankList


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


def test_pages_load_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/docs", "/v1/config", "/static/main.js", "/nowhere"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert "http" not in client.get("/").text.replace("http-equiv", "")
    licence = client.get("/static/vendor/uplot/LICENSE")
    assert "MIT License" in licence.text
    assert client.get("/static/../app.py").status_code == 404
    assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_events_are_pushed(tmp_path: Path, planned_run: SyntheticRun) -> None:
    planned_run.batch()
    app = create_app(tmp_path, None, False, options=AppOptions(event_seconds=0.01))
    sent: list[bytes] = []

    async def listen() -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, bytes]) -> None:
            sent.append(message.get("body", b""))
            app.state.stopping = len(sent) > 3

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/events",
            "raw_path": b"/v1/events",
            "query_string": b"seconds=60",
            "headers": [],
            "app": app,
        }
        await app(scope, receive, send)  # type: ignore[arg-type]  # it ends when told to stop

    asyncio.run(listen())
    name, data, *_ = sent[1].decode().split("\n")
    assert name == "event: overview"
    assert json.loads(data.removeprefix("data: "))["last_batch"]["batch"] == 1


def test_answers_are_shared_for_a_moment() -> None:
    made = []

    def make() -> RankList:
        made.append(1)
        return RankList(True, 2, [])

    answers = AnswerCache(reuse_seconds=3600)
    assert answers.encoded("a", make) == answers.encoded("a", make)
    answers.encoded("b", make)
    assert len(made) == 2
    for key in range(100):
        answers.encoded(key, make)
    answers.encoded("a", make)  # has given way
    assert len(made) == 103


def test_an_answer_is_made_anew_behind_those_who_ask() -> None:
    made, may_end = [threading.Event(), threading.Event()], threading.Event()

    def make() -> RankList:
        if not made[0].is_set():
            made[0].set()
            return RankList(True, 2, [])
        may_end.wait(60)
        made[1].set()
        return RankList(False, 2, [])

    answers = AnswerCache(reuse_seconds=3600)
    first = answers.encoded("a", make)
    answers._answers["a"].made_at -= 2000
    assert answers.encoded("a", make) == first  # nobody waits
    may_end.set()
    assert made[1].wait(60)
    with answers._answers["a"].lock:
        assert answers.encoded("a", make) != first
