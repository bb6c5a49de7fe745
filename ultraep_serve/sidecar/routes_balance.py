"""Endpoints that show the balance."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from ultraep_serve.observability import BalanceSnapshot, Window
from ultraep_serve.observability.batches import BatchList, batch_snapshots
from ultraep_serve.observability.layers import LayerDetail, layer_detail
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy

__all__ = ["balance_routes"]

SinceNs = Annotated[
    int, Query(ge=0, lt=1 << 63, description="only what happened at or after this Unix time")
]
PolicyName = Annotated[Policy | None, Query(description="only records under this policy")]
Limit = Annotated[int, Query(ge=1, le=1000, description="batches to return")]


def balance_routes(store: RunStore) -> APIRouter:
    """The routes over ``store``; each polls first, so no answer is older than its request."""
    router = APIRouter(prefix="/v1/balance")

    @router.get("")
    def balance(since_ns: SinceNs = 0, policy: PolicyName = None) -> BalanceSnapshot:
        """Imbalance, replicas, bytes and times over the window.

        Without parameters batches are counted since the engine started; with them, over the
        records still held.
        """
        store.poll()
        return store.snapshot(Window(since_ns, policy))

    @router.get("/layers/{layer}")
    def layer(layer: int, since_ns: SinceNs = 0, policy: PolicyName = None) -> LayerDetail:
        """One MoE layer: also the load of each rank and where its replicas were last."""
        store.poll()
        window = Window(since_ns, policy)
        own = [window.weighed(view.records) for view in store.views()]
        detail = layer_detail(layer, window.weighed(store.lead_records()), own)
        if detail is None:
            raise HTTPException(404, f"no records of layer {layer} in this window")
        return detail

    @router.get("/batches")
    def batches(limit: Limit = 20, since_ns: SinceNs = 0, policy: PolicyName = None) -> BatchList:
        """The newest batches that reached the planner, newest first."""
        store.poll()
        window = Window(since_ns, policy)
        own = [window.recorded(view.records) for view in store.views()]
        return batch_snapshots(window.recorded(store.lead_records()), own, limit)

    return router
