"""Endpoints that show the balance, asked for or pushed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from ultraep_serve.sidecar.answers import Answers
from ultraep_serve.sidecar.health import Overview, RankList
from ultraep_serve.sidecar.overview import overview
from ultraep_serve.sidecar.statistics.batches import (
    BatchDetail,
    BatchLayerDetail,
    BatchList,
    batch_detail,
    batch_layer_detail,
    batch_snapshots,
)
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot
from ultraep_serve.sidecar.statistics.summary import (
    Heatmap,
    LayerDetail,
    PolicyComparison,
    compare_policies,
    heatmap,
    layer_detail,
)
from ultraep_serve.sidecar.statistics.window import Window
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.sidecar.timeline import History
from ultraep_serve.types import Policy

__all__ = ["NO_RUN", "balance_routes", "live_routes"]

_MOST = (1 << 63) - 1

SinceNs = Annotated[
    int, Query(ge=0, le=_MOST, description="only what happened at or after this Unix time")
]
PolicyName = Annotated[Policy | None, Query(description="only records under this policy")]
Limit = Annotated[int, Query(ge=1, le=1000, description="batches to return")]
Before = Annotated[
    int | None, Query(ge=0, le=_MOST, description="only batches with smaller numbers")
]
Seconds = Annotated[int, Query(ge=10, le=3600, description="how far back")]
Step = Annotated[int, Query(ge=1, le=600, description="seconds per entry")]
Layer = Annotated[int, InPath(ge=0, le=1 << 30)]
Batch = Annotated[int, InPath(ge=0, le=_MOST)]

NO_RUN: dict[int | str, dict[str, Any]] = {503: {"description": "no ring can be read"}}
_NOT_HELD: dict[int | str, dict[str, Any]] = {404: {"description": "no records of it are held"}}


def balance_routes(store: RunStore, answers: Answers) -> APIRouter:
    """The routes over ``store``; each polls first. What all clients ask is shared: ``answers``."""
    router = APIRouter(prefix="/v1/balance", responses=NO_RUN, tags=["balance"])
    _add_summaries(router, store, answers)
    _add_details(router, store)
    return router


def _add_summaries(router: APIRouter, store: RunStore, answers: Answers) -> None:
    def shared(make: Callable[..., Any], *question: Hashable) -> Response:
        """``make(store, *question)`` after a poll, once for all who ask the same."""

        def polled() -> Any:
            store.poll()
            return make(store, *question)

        return answers.give((make, *question), polled)

    @router.get("", response_model=BalanceSnapshot)
    def balance(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Imbalance, replicas, bytes, times and savings over the window.

        Without parameters batches are counted since the engine started; with them, over the
        records still held.
        """
        return shared(RunStore.snapshot, Window(since_ns, policy))

    @router.get("/heatmap", response_model=Heatmap)
    def heat(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Load of each rank in each layer over the mean of the layer's ranks."""
        return shared(_heatmap, Window(since_ns, policy))

    @router.get("/history", response_model=History)
    def history(seconds: Seconds = 300, step: Step = 2) -> Response:
        """Imbalance and savings over time, also from before the records still held."""
        return shared(_history, seconds, step)

    @router.get("/policies", response_model=PolicyComparison)
    def policies(since_ns: SinceNs = 0) -> Response:
        """The policies of the records held, side by side; routing alone (off) is the baseline."""
        return shared(_policies, Window(since_ns))

    @router.get("/batches", response_model=BatchList)
    def batches(
        limit: Limit = 20,
        before: Before = None,
        since_ns: SinceNs = 0,
        policy: PolicyName = None,
    ) -> Response:
        """The newest batches that reached the planner, newest first."""
        return shared(_batches, limit, before, Window(since_ns, policy))


def _heatmap(store: RunStore, window: Window) -> Heatmap:
    return heatmap(window.weighed(store.held().primary))


def _history(store: RunStore, seconds: int, step: int) -> History:
    return store.history(int(time.time()), seconds, step)


def _policies(store: RunStore, window: Window) -> PolicyComparison:
    _, primary, own = store.held()
    return compare_policies(window, primary, own)


def _batches(store: RunStore, limit: int, before: int | None, window: Window) -> BatchList:
    _, primary, own = store.held()
    own = [window.recorded(records) for records in own]
    return batch_snapshots(window.recorded(primary), own, limit, before)


def _add_details(router: APIRouter, store: RunStore) -> None:
    @router.get("/layers/{layer}", responses=_NOT_HELD)
    def layer(layer: Layer, since_ns: SinceNs = 0, policy: PolicyName = None) -> LayerDetail:
        """One MoE layer: also the load of each rank and where its replicas were last."""
        store.poll()
        window = Window(since_ns, policy)
        header, primary, own = store.held()
        own = [window.weighed(records) for records in own]
        detail = layer_detail(layer, window.weighed(primary), own, header.location.domain_size)
        if detail is None:
            raise HTTPException(404, f"no records of layer {layer} in this window")
        return detail

    @router.get("/batches/{batch}", responses=_NOT_HELD)
    def batch(batch: Batch) -> BatchDetail:
        """One batch, layer by layer."""
        store.poll()
        _, primary, own = store.held()
        detail = batch_detail(batch, primary, own)
        if detail is None:
            raise HTTPException(404, f"no records of batch {batch} are held")
        return detail

    @router.get("/batches/{batch}/layers/{layer}", responses=_NOT_HELD)
    def batch_layer(batch: Batch, layer: Layer) -> BatchLayerDetail:
        """One MoE layer of one batch: loads by rank and expert, replicas, times by rank."""
        store.poll()
        header, primary, own = store.held()
        detail = batch_layer_detail(batch, layer, header.shape, primary, own)
        if detail is None:
            raise HTTPException(404, f"no records of layer {layer} of batch {batch} are held")
        return detail


_MAX_LISTENERS = 64

RecentSeconds = Annotated[int, Query(ge=1, le=3600, description="how far back")]
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
    def get_overview(seconds: RecentSeconds = 60) -> Response:
        """Health, balance over the last seconds, the newest batch; also without an engine."""
        return Response(encoded(seconds), media_type="application/json")

    @router.get("/ranks", responses=NO_RUN)
    def ranks() -> RankList:
        """The health of every rank."""
        store.poll()
        return store.ranks()

    @router.get("/events", response_class=StreamingResponse, responses=_EVENTS)
    async def events(request: Request, seconds: RecentSeconds = 60) -> StreamingResponse:
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
