"""Endpoints that show health and balance, on request or pushed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from ultraep_serve.sidecar.answers import BUSY, AnswerCache
from ultraep_serve.sidecar.health import Overview, RankList
from ultraep_serve.sidecar.statistics.batches import (
    BatchDetail,
    BatchLayerDetail,
    BatchList,
    BatchSnapshot,
    batch_detail,
    batch_layer_detail,
    batch_snapshot,
    batch_snapshots,
)
from ultraep_serve.sidecar.statistics.fold import (
    mean_floor,
    rank_speeds,
    time_imbalance_snapshot,
)
from ultraep_serve.sidecar.statistics.selection import RecordSelection
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot
from ultraep_serve.sidecar.statistics.summary import (
    Heatmap,
    LayerDetail,
    PolicyComparison,
    batches_count,
    compare_policies,
    heatmap,
    layer_detail,
    phases,
)
from ultraep_serve.sidecar.statistics.timeline import History
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.telemetry.record import RecordArray
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
_Shared = Callable[..., Awaitable[Response]]  # as in ``balance_routes``
_BUSY: _Responses = {BUSY: {"description": "too much is asked at once"}}
_NOT_HELD: _Responses = {404: {"description": "no records of it are held"}}
_EVENTS: _Responses = {
    200: {"content": {"text/event-stream": {}}, "description": "events of type overview"},
    503: {"description": "too many listeners"},
}


def balance_routes(store: RunStore, answers: AnswerCache) -> APIRouter:
    """The routes over ``store``; each polls first. Summaries are shared through ``answers``."""
    router = APIRouter(prefix="/v1/balance", responses=_NO_RUN, tags=["balance"])

    async def shared(make: Callable[..., Any], *question: Hashable) -> Response:
        """``make(store, *question)`` after a poll, once for all who ask the same."""

        def polled() -> Any:
            store.poll()
            return make(store, *question)

        return await answers.give((make, *question), polled)

    _add_summaries(router, shared)
    _add_details(router, shared)
    return router


def _add_summaries(router: APIRouter, shared: _Shared) -> None:
    @router.get("", response_model=BalanceSnapshot)
    async def balance(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Imbalance, replicas, bytes, times and savings over the window.

        Without parameters batches are counted since the engine started, else over the records
        still held.
        """
        return await shared(RunStore.snapshot, RecordSelection(since_ns, policy))

    @router.get("/heatmap", response_model=Heatmap)
    async def heat(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Load of each rank in each layer, relative to the mean of the layer's ranks."""
        return await shared(_heatmap, RecordSelection(since_ns, policy))

    @router.get("/history", response_model=History)
    async def history(seconds: Seconds = 300, step: Step = 2) -> Response:
        """Imbalance and savings over time, further back than records are held."""
        return await shared(_history, seconds, step)

    @router.get("/policies", response_model=PolicyComparison)
    async def policies(since_ns: SinceNs = 0) -> Response:
        """The policies of the records held, for comparison; routing alone (off) is the baseline."""
        return await shared(_policies, RecordSelection(since_ns))

    @router.get("/batches", response_model=BatchList)
    async def batches(
        limit: Limit = 20,
        before: Before = None,
        since_ns: SinceNs = 0,
        policy: PolicyName = None,
    ) -> Response:
        """Prefill batches, newest first; under policy off none are recorded."""
        return await shared(_batches, limit, before, RecordSelection(since_ns, policy))


def _heatmap(store: RunStore, selection: RecordSelection) -> Heatmap:
    return heatmap(selection.considered(store.held().primary))


def _history(store: RunStore, seconds: int, step: int) -> History:
    return store.history(int(time.time()), seconds, step)


def _policies(store: RunStore, selection: RecordSelection) -> PolicyComparison:
    _, primary, own = store.held()
    return compare_policies(selection, primary, own)


def _batches(
    store: RunStore, limit: int, before: int | None, selection: RecordSelection
) -> BatchList:
    _, primary, own = store.held()
    own = [selection.recorded(records) for records in own]
    return batch_snapshots(selection.recorded(primary), own, limit, before)


def _add_details(router: APIRouter, shared: _Shared) -> None:
    @router.get("/layers/{layer}", response_model=LayerDetail, responses=_NOT_HELD)
    async def layer(layer: Layer, since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """One MoE layer: also the load of each rank and where its last replicas were."""
        return await shared(_layer, layer, RecordSelection(since_ns, policy))

    @router.get("/batches/{batch}", response_model=BatchDetail, responses=_NOT_HELD)
    async def batch(batch: Batch) -> Response:
        """One batch, layer by layer."""
        return await shared(_batch, batch)

    @router.get(
        "/batches/{batch}/layers/{layer}", response_model=BatchLayerDetail, responses=_NOT_HELD
    )
    async def batch_layer(batch: Batch, layer: Layer) -> Response:
        """One MoE layer of one batch: loads by rank and expert, replicas, times by rank."""
        return await shared(_batch_layer, batch, layer)


def _layer(store: RunStore, layer: int, selection: RecordSelection) -> LayerDetail:
    _, primary, own = store.held()
    own = [selection.considered(records) for records in own]
    detail = layer_detail(layer, selection.considered(primary), own)
    if detail is None:
        raise HTTPException(404, f"no records of layer {layer} in this window")
    return detail


def _batch(store: RunStore, batch: int) -> BatchDetail:
    _, primary, own = store.held()
    detail = batch_detail(batch, primary, own)
    if detail is None:
        raise HTTPException(404, f"no records of batch {batch} are held")
    return detail


def _batch_layer(store: RunStore, batch: int, layer: int) -> BatchLayerDetail:
    header, primary, own = store.held()
    detail = batch_layer_detail(batch, layer, header.shape, primary, own)
    if detail is None:
        raise HTTPException(404, f"no records of layer {layer} of batch {batch} are held")
    return detail


def live_routes(
    store: RunStore, answers: AnswerCache, operations: AnswerCache, period: float
) -> APIRouter:
    """The routes to what is polled or pushed often; an event every ``period`` seconds.

    ``operations`` are answers that nobody's questions keep waiting.
    """
    router = APIRouter(prefix="/v1", tags=["live"])
    listeners = Listeners()

    async def encoded(seconds: int) -> bytes:
        return await answers.encoded(("overview", seconds), lambda: overview(store, seconds))

    @router.get("/overview", response_model=Overview, responses=_BUSY)
    async def get_overview(seconds: RecentSeconds = 60) -> Response:
        """Health, balance over the last seconds, the newest batch; works without an engine."""
        return Response(await encoded(seconds), media_type="application/json")

    @router.get("/ranks", response_model=RankList, responses=_NO_RUN)
    async def ranks() -> Response:
        """The health of every rank."""

        def polled() -> RankList:
            store.poll()
            return store.ranks()

        return await operations.give("ranks", polled)

    @router.get("/events", response_class=StreamingResponse, responses=_EVENTS)
    async def events(request: Request, seconds: RecentSeconds = 60) -> Response:
        """Server-sent events: an overview every second, until the client disconnects."""

        async def stream() -> AsyncIterator[bytes]:
            while not (request.app.state.stopping or await request.is_disconnected()):
                with contextlib.suppress(HTTPException):  # too busy for this one
                    yield _event("overview", await encoded(seconds))
                await asyncio.sleep(period)

        return listeners.response(stream())

    return router


class Listeners:
    """Those who are pushed events, counted from before their answer begins until it has ended."""

    def __init__(self) -> None:
        self._count = 0

    def response(self, events: AsyncIterator[bytes]) -> Response:
        """``events`` to one more; 503 where there are too many."""
        listeners = self

        class Counted(StreamingResponse):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                if listeners._count >= _MAX_LISTENERS:
                    detail = f"{_MAX_LISTENERS} clients listen; poll /v1/overview instead"
                    await JSONResponse({"detail": detail}, BUSY)(scope, receive, send)
                    return
                listeners._count += 1
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    listeners._count -= 1

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return Counted(events, media_type="text/event-stream", headers=headers)


def overview(store: RunStore, seconds: int) -> Overview:
    """The overview over the last ``seconds``; polls first."""
    store.poll()
    now_ns = time.time_ns()
    try:
        header, health = store.header(), store.ranks()
        (_, primary, own), totals = store.held(), store.totals(now_ns, seconds)
    except NoRunError:
        unbalanced = store.unbalanced()
        return Overview(
            now_ns,
            ready=bool(unbalanced),
            reasons={} if unbalanced else store.problems(),
            window_seconds=seconds,
            unbalanced=unbalanced,
        )
    paused = store.control().paused
    recent = RecordSelection(now_ns - seconds * 10**9).considered(primary)
    return Overview(
        time_ns=now_ns,
        ready=health.ready,
        reasons={str(rank.rank): rank.problem for rank in health.ranks if rank.problem},
        window_seconds=seconds,
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        paused_policy=paused.value if paused else None,
        num_ranks=header.shape.num_ranks,
        num_layers=header.num_layers,
        num_experts=header.shape.num_logical_experts,
        num_slots=header.shape.num_replica_slots,
        batches=batches_count(totals.batches),
        phases=phases(totals.batches, totals.imbalance),
        time_imbalance=time_imbalance_snapshot(recent),
        speeds=rank_speeds(primary),
        floor=mean_floor(recent),
        bytes_moved=totals.bytes_sent,
        savings=totals.savings,
        last_batch=_newest(primary, own),
        ranks=health.ranks,
    )


def _newest(primary: RecordArray, own: list[RecordArray]) -> BatchSnapshot | None:
    if not len(primary):
        return None
    number = primary["batch"][-1]
    sent = (records["bytes_sent"][records["batch"] == number].sum() for records in own)
    return batch_snapshot(primary[primary["batch"] == number], int(sum(sent)))


def _event(name: str, data: bytes) -> bytes:
    """One event; ``data`` has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
