"""Endpoints that show health and balance."""

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi import Path as InPath
from pydantic import BaseModel

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
    heatmap,
    layer_detail,
    summarise,
)
from ultraep_serve.sidecar.statistics.timeline import History
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy

__all__ = ["balance_routes"]

_MAX_NUMBER = (1 << 63) - 1

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
_NO_RUN: _Responses = {503: {"description": "no ring can be read, or it runs unbalanced"}}
_NOT_HELD: _Responses = {404: {"description": "no records of it are held"}}


def _json(document: BaseModel) -> Response:
    """Without the second validation that FastAPI gives to an answer."""
    return Response(document.model_dump_json(), media_type="application/json")


def balance_routes(store: RunStore) -> APIRouter:
    """The routes over ``store``; each polls first."""
    router = APIRouter(prefix="/v1", responses=_NO_RUN, tags=["balance"])

    @router.get("/overview", response_model=Overview)
    def get_overview(seconds: RecentSeconds = 60) -> Response:
        """Health, balance over the last seconds, the newest batch; works without an engine."""
        return _json(overview(store, time.time_ns(), seconds))

    @router.get("/ranks", response_model=RankList)
    def ranks() -> Response:
        """The health of every rank."""
        return _json(rank_list(store.poll().held()))

    @router.get("/balance", response_model=BalanceSnapshot)
    def balance(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Imbalance, replicas, bytes, times and savings over the window.

        Without parameters batches are counted since the engine started, else over the records
        still held.
        """
        return _json(summarise(store.poll().held(), RecordSelection(since_ns, policy)))

    @router.get("/balance/heatmap", response_model=Heatmap)
    def heat(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Load of each rank in each layer, relative to the mean of the layer's ranks."""
        return _json(heatmap(store.poll().held(), RecordSelection(since_ns, policy)))

    @router.get("/balance/history", response_model=History)
    def history(seconds: Seconds = 300, step: Step = 2) -> Response:
        """Imbalance and savings over time, further back than records are held."""
        store.poll()
        with store.timeline() as timeline:
            return _json(timeline.history(int(time.time()), seconds, step))

    @router.get("/balance/batches", response_model=BatchList)
    def batches(
        limit: Limit = 20,
        before: Before = None,
        since_ns: SinceNs = 0,
        policy: PolicyName = None,
    ) -> Response:
        """Prefill batches, newest first; under policy off none are recorded."""
        selection = RecordSelection(since_ns, policy)
        return _json(batch_snapshots(store.poll().held(), limit, before, selection))

    @router.get("/balance/layers/{layer}", response_model=LayerDetail, responses=_NOT_HELD)
    def layer(layer: Layer, since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """One MoE layer: also the load of each rank and where its last replicas were."""
        return _json(layer_detail(store.poll().held(), layer, RecordSelection(since_ns, policy)))

    @router.get("/balance/batches/{batch}", response_model=BatchDetail, responses=_NOT_HELD)
    def batch(batch: Batch) -> Response:
        """One batch, layer by layer."""
        return _json(batch_detail(store.poll().held(), batch))

    @router.get(
        "/balance/batches/{batch}/layers/{layer}",
        response_model=BatchLayerDetail,
        responses=_NOT_HELD,
    )
    def batch_layer(batch: Batch, layer: Layer) -> Response:
        """One MoE layer of one batch: loads by rank and expert, replicas, times by rank."""
        return _json(batch_layer_detail(store.poll().held(), batch, layer))

    return router
