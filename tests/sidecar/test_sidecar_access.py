"""Who is refused, before anything is read of what they send; and how much anybody may send."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from tests.support.sidecar_runs import BEARER, TOKEN, SkewedRun, request
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Policy

PIECE = b" " * 4096
LIMIT = 64 << 10


def posted(app: FastAPI, headers: dict[str, str], pieces: int) -> tuple[int, dict[str, str], int]:
    """Status, answer, and how many of ``pieces`` of a body without a stated length were read."""
    read, sent = [0], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        read[0] += 1
        return {"type": "http.request", "body": PIECE, "more_body": read[0] < pieces}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(request(app, "/v1/control/policy", receive, send, "POST", headers))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body), read[0]


@pytest.mark.parametrize(
    ("headers", "token", "wanted"),
    [({}, TOKEN, 401), ({"Authorization": "Bearer wrong"}, TOKEN, 401), (BEARER, None, 403)],
)
def test_nothing_is_read_of_who_may_not_change_anything(
    headers: dict[str, str], token: str | None, wanted: int, tmp_path: Path
) -> None:
    status, answer, read = posted(create_app(tmp_path, token, False), headers, 10**6)
    assert (status, read) == (wanted, 0)
    assert answer.keys() == {"detail"}


def test_large_bodies_are_not_read_to_their_end(tmp_path: Path) -> None:
    status, answer, read = posted(create_app(tmp_path, TOKEN, False), BEARER, 10**6)
    assert (status, read) == (413, LIMIT // len(PIECE) + 1)
    assert str(LIMIT) in answer["detail"]


def test_bodies_up_to_the_limit_are_accepted(
    tmp_path: Path, skewed_run: SkewedRun, client: TestClient
) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    for size, wanted in ((LIMIT, 200), (LIMIT + 1, 413)):
        body = b'{"policy": "off"}'.ljust(size)
        headers = {**BEARER, "Content-Type": "application/json"}
        answer = client.post("/v1/control/policy", content=body, headers=headers)
        assert answer.status_code == wanted
    engine.close()


def test_no_other_route_reads_a_body(tmp_path: Path) -> None:
    routes = create_app(tmp_path, TOKEN, False).routes
    reading = [route for route in routes if isinstance(route, APIRoute) and route.body_field]
    assert len(reading) == 5
    assert {type(route).__name__ for route in reading} == {"BearersOnly"}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"\\ud800"'])
@pytest.mark.parametrize("path", ["policy", "lease", "threshold", "speeds", "record"])
def test_values_that_json_cannot_answer_are_refused(
    path: str, value: str, client: TestClient
) -> None:
    """An answer that showed them would be no JSON, or no UTF-8."""
    key = {"threshold": "max_imbalance", "record": "level", "lease": "seconds"}.get(path, path)
    headers = {**BEARER, "Content-Type": "application/json"}
    for body in (value, f'{{"{key}": {value}}}', f'{{"{key}": 1, "other": [{value}]}}'):
        answer = client.post(f"/v1/control/{path}", content=body, headers=headers)
        assert answer.status_code == 422, body
        assert answer.json()["detail"]
