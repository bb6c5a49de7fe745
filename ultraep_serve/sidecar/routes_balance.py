"""Endpoints that show health and balance, on request or pushed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from ultraep_serve.sidecar.answers import BUSY, AnswerCache
from ultraep_serve.sidecar.overview import Overview, RankList, overview, rank_list
from ultraep_serve.sidecar.statistics.batches import (
    BatchDetail,
    BatchLayerDetail,
    BatchList,
    batch_detail,
    batch_layer_detail,
    batch_snapshots,
)
from ultraep_serve.sidecar.statistics.selection import RecordSelection
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot
from ultraep_serve.sidecar.statistics.summary import (
    Heatmap,
    LayerDetail,
    PolicyComparison,
    compare_policies,
    heatmap,
    layer_detail,
    summarise,
)
from ultraep_serve.sidecar.statistics.timeline import History
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy

__all__ = ["balance_routes", "live_routes"]

_MAX_NUMBER = (1 << 63) - 1
_MAX_LISTENERS = 64

SinceNs = Annotated[
    int, Query(ge=0, le=_MAX_NUMBER, description="only what happened at or after this Unix time")
]
PolicyName = Annotated[Policy | None, Query(description="only records under this policy")]
Limit = Annotated[int, Query(ge=1, le=1000, description="batches to return")]
Before = Annotated[
    int | None, Query(ge=0, le=_MAX_NUMBER, description="only batches with smaller numbers")
]
Seconds = Annotated[int, Query(ge=10, le=3600, description="how far back")]
RecentSeconds = Annotated[int, Query(ge=1, le=3600, description="how far back")]
Step = Annotated[int, Query(ge=1, le=600, description="seconds per entry")]
Layer = Annotated[int, InPath(ge=0, le=1 << 30)]
Batch = Annotated[int, InPath(ge=0, le=_MAX_NUMBER)]

_Responses = dict[int | str, dict[str, Any]]
_NO_RUN: _Responses = {
    503: {"description": "no ring can be read, it runs unbalanced, or too much is asked at once"}
}
_BUSY: _Responses = {BUSY: {"description": "too much is asked at once"}}
_NOT_HELD: _Responses = {404: {"description": "no records of it are held"}}
_EVENTS: _Responses = {
    200: {"content": {"text/event-stream": {}}, "description": "events of type overview"},
    503: {"description": "too many listeners"},
}


def balance_routes(store: RunStore, answers: AnswerCache) -> APIRouter:
    """The routes over ``store``; each polls first. Summaries are shared through ``answers``."""
    router = APIRouter(prefix="/v1/balance", responses=_NO_RUN, tags=["balance"])

    def shared(make: Callable[..., Any], *question: Hashable) -> Awaitable[Response]:
        """``make(held, *question)`` after a poll, once for all who ask the same."""
        return answers.give((make, *question), lambda: make(store.poll().held(), *question))

    @router.get("", response_model=BalanceSnapshot)
    async def balance(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Imbalance, replicas, bytes, times and savings over the window.

        Without parameters batches are counted since the engine started, else over the records
        still held.
        """
        return await shared(summarise, RecordSelection(since_ns, policy))

    @router.get("/heatmap", response_model=Heatmap)
    async def heat(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Load of each rank in each layer, relative to the mean of the layer's ranks."""
        return await shared(heatmap, RecordSelection(since_ns, policy))

    @router.get("/history", response_model=History)
    async def history(seconds: Seconds = 300, step: Step = 2) -> Response:
        """Imbalance and savings over time, further back than records are held."""
        return await answers.give((History, seconds, step), lambda: _history(store, seconds, step))

    @router.get("/policies", response_model=PolicyComparison)
    async def policies(since_ns: SinceNs = 0) -> Response:
        """The policies of the records held, for comparison; routing alone (off) is the baseline."""
        return await shared(compare_policies, since_ns)

    @router.get("/batches", response_model=BatchList)
    async def batches(
        limit: Limit = 20,
        before: Before = None,
        since_ns: SinceNs = 0,
        policy: PolicyName = None,
    ) -> Response:
        """Prefill batches, newest first; under policy off none are recorded."""
        return await shared(batch_snapshots, limit, before, RecordSelection(since_ns, policy))

    @router.get("/layers/{layer}", response_model=LayerDetail, responses=_NOT_HELD)
    async def layer(layer: Layer, since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """One MoE layer: also the load of each rank and where its last replicas were."""
        return await shared(layer_detail, layer, RecordSelection(since_ns, policy))

    @router.get("/batches/{batch}", response_model=BatchDetail, responses=_NOT_HELD)
    async def batch(batch: Batch) -> Response:
        """One batch, layer by layer."""
        return await shared(batch_detail, batch)

    @router.get(
        "/batches/{batch}/layers/{layer}", response_model=BatchLayerDetail, responses=_NOT_HELD
    )
    async def batch_layer(batch: Batch, layer: Layer) -> Response:
        """One MoE layer of one batch: loads by rank and expert, replicas, times by rank."""
        return await shared(batch_layer_detail, batch, layer)

    return router


def _history(store: RunStore, seconds: int, step: int) -> History:
    store.poll()
    with store.timeline() as timeline:
        return timeline.history(int(time.time()), seconds, step)


def live_routes(
    store: RunStore, answers: AnswerCache, operations: AnswerCache, period: float
) -> APIRouter:
    """The routes to what is polled or pushed often; an event every ``period`` seconds.

    ``operations`` are answers that nobody's questions keep waiting.
    """
    router = APIRouter(prefix="/v1", tags=["live"])
    listeners = 0

    async def encoded(seconds: int) -> bytes:
        return await answers.encoded(
            ("overview", seconds), lambda: overview(store, time.time_ns(), seconds)
        )

    async def listening() -> AsyncIterator[None]:
        """From before an answer begins until it has ended."""
        nonlocal listeners
        if listeners >= _MAX_LISTENERS:
            detail = f"{_MAX_LISTENERS} clients listen; poll /v1/overview instead"
            raise HTTPException(BUSY, detail)
        listeners += 1
        try:
            yield
        finally:
            listeners -= 1

    @router.get("/overview", response_model=Overview, responses=_BUSY)
    async def get_overview(seconds: RecentSeconds = 60) -> Response:
        """Health, balance over the last seconds, the newest batch; works without an engine."""
        return Response(await encoded(seconds), media_type="application/json")

    @router.get("/ranks", response_model=RankList, responses=_NO_RUN)
    async def ranks() -> Response:
        """The health of every rank."""
        return await operations.give("ranks", lambda: rank_list(store.poll().held()))

    @router.get(
        "/events",
        response_class=StreamingResponse,
        responses=_EVENTS,
        dependencies=[Depends(listening)],
    )
    async def events(request: Request, seconds: RecentSeconds = 60) -> Response:
        """Server-sent events: an overview every second, until the client disconnects."""

        async def stream() -> AsyncIterator[bytes]:
            while not (request.app.state.stopping() or await request.is_disconnected()):
                with contextlib.suppress(HTTPException):  # too busy for this one
                    yield b"event: overview\ndata: " + await encoded(seconds) + b"\n\n"
                await asyncio.sleep(period)

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    return router
