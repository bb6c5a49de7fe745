"""Endpoints of what is going on now, asked for or pushed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from ultraep_serve.sidecar.answers import Answers
from ultraep_serve.sidecar.health import Overview, RankList
from ultraep_serve.sidecar.overview import overview
from ultraep_serve.sidecar.routes_balance import NO_RUN
from ultraep_serve.sidecar.store import RunStore

__all__ = ["live_routes"]

_MAX_LISTENERS = 64

Seconds = Annotated[int, Query(ge=1, le=3600, description="how far back")]
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "events of type overview"},
    503: {"description": "too many listeners"},
}


def live_routes(store: RunStore, answers: Answers, period: float) -> APIRouter:
    """The routes over ``store``; an event every ``period`` seconds."""
    router = APIRouter(prefix="/v1", tags=["live"])
    listeners = [0]

    def encoded(seconds: int) -> bytes:
        return answers.encoded(("overview", seconds), lambda: overview(store, seconds))

    @router.get("/overview", response_model=Overview)
    def get_overview(seconds: Seconds = 60) -> Response:
        """Health, balance over the last seconds, the newest batch; also without an engine."""
        return Response(encoded(seconds), media_type="application/json")

    @router.get("/ranks", responses=NO_RUN)
    def ranks() -> RankList:
        """The health of every rank."""
        store.poll()
        return store.ranks()

    @router.get("/events", response_class=StreamingResponse, responses=_EVENTS)
    async def events(request: Request, seconds: Seconds = 60) -> StreamingResponse:
        """Server-sent events: an overview whenever a period has passed, until you leave."""
        if listeners[0] >= _MAX_LISTENERS:
            raise HTTPException(503, f"{_MAX_LISTENERS} listen already; poll /v1/overview")

        async def stream() -> AsyncIterator[bytes]:
            listeners[0] += 1
            try:
                while not (request.app.state.stopping or await request.is_disconnected()):
                    yield _event("overview", await run_in_threadpool(encoded, seconds))
                    await asyncio.sleep(period)
            finally:
                listeners[0] -= 1

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    return router


def _event(name: str, data: bytes) -> bytes:
    """One event; ``data`` has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
