"""The endpoints: state, balance, and control of the policy."""

import threading
from pathlib import Path
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

from ultraep_serve import __version__
from ultraep_serve.errors import ControlError
from ultraep_serve.sidecar.access import MAX_BODY_BYTES
from ultraep_serve.sidecar.balance import BalanceSnapshot, summarise
from ultraep_serve.sidecar.documents import (
    ConfigAnswer,
    NoBalance,
    PolicyAnswer,
    PolicyRequest,
    Readiness,
)
from ultraep_serve.sidecar.layers import BatchList, LayerDetail, batch_list, layer_detail
from ultraep_serve.sidecar.metrics import StoreCollector
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

_MAX_NUMBER = (1 << 63) - 1

SinceNs = Annotated[
    int, Query(ge=0, le=_MAX_NUMBER, description="only what happened at or after this Unix time")
]
PolicyName = Annotated[Policy | None, Query(description="only batches under this policy")]
Limit = Annotated[int, Query(ge=1, le=1000, description="batches to return")]
Before = Annotated[
    int | None, Query(ge=0, le=_MAX_NUMBER, description="only batches with smaller numbers")
]
Layer = Annotated[int, InPath(ge=0, le=1 << 30)]

_Responses = dict[int | str, dict[str, Any]]
_NO_RUN: _Responses = {503: {"model": NoBalance}}
_NOT_HELD: _Responses = {404: {"description": "no records of it are held"}}
_REFUSALS: _Responses = {
    401: {"description": "the token is missing or wrong"},
    403: {"description": "the sidecar has no token"},
    409: {
        "description": "no engine to control, not the first host's sidecar, or policy ideal in a "
        "server that was started without --allow-ideal"
    },
    411: {"description": "the length of the body is not stated"},
    413: {"description": f"the body has more than {MAX_BODY_BYTES} bytes"},
}


def state_routes(store: RunStore, files: RunFiles, *, control_open: bool) -> APIRouter:
    """Health, readiness, metrics and configuration, which says whether ``control_open``."""
    router = APIRouter(tags=["state"])
    prober = CapacityLimiter(1)  # a thread of its own: whatever others ask, probes are answered

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """200 while the sidecar itself answers."""
        return {"status": "ok"}

    @router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
    async def readyz() -> JSONResponse:
        """200 when every rank of this host is alive and ready, or runs unbalanced, else 503.

        With the reasons. A server that could not be balanced is ready, with status unbalanced:
        on_unsupported=off says that serving matters more than balancing, and a probe that failed
        would end the serving. So is one whose balancing has switched itself off.
        """
        found = (await to_thread.run_sync(store.poll, limiter=prober)).readiness
        return JSONResponse(found.model_dump(), status_code=200 if found.ready else 503)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
    )
    def metrics(request: Request) -> Response:
        """Prometheus metrics, in the format that the client prefers."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # it asks for a version that is no number
            encode, content_type = choose_encoder("")
        return Response(encode(StoreCollector(store)), headers={"content-type": content_type})

    @router.get("/v1/config")
    def config() -> ConfigAnswer:
        """The settings at start."""
        return ConfigAnswer(version=__version__, control_open=control_open, config=files.config())

    return router


def balance_routes(store: RunStore) -> APIRouter:
    """What is answered from the rows held; each answer polls first."""
    router = APIRouter(prefix="/v1/balance", responses=_NO_RUN, tags=["balance"])

    @router.get("", response_model=BalanceSnapshot)
    def balance(since_ns: SinceNs = 0, policy: PolicyName = None) -> Response:
        """Readiness, imbalance, replicas, bytes and savings over the last 15 minutes, or less."""
        return _json(summarise(store.poll(), since_ns, policy))

    @router.get("/batches", response_model=BatchList)
    def batches(limit: Limit = 20, before: Before = None) -> Response:
        """Prefill batches, newest first; under policy off none are recorded."""
        return _json(batch_list(store.poll().held(), limit, before))

    @router.get("/layers/{layer}", response_model=LayerDetail, responses=_NOT_HELD)
    def one_layer(layer: Layer) -> Response:
        """One MoE layer, and its plan in the newest batch: loads, replicas, times by rank."""
        found = layer_detail(store.poll().held(), layer)
        if found is None:
            raise HTTPException(404, f"no records of layer {layer} are held")
        return _json(found)

    return router


def _json(document: BaseModel) -> Response:
    """Without the second validation that FastAPI gives to an answer."""
    return Response(document.model_dump_json(), media_type="application/json")


def control_routes(store: RunStore, run_dir: Path) -> APIRouter:
    """The policy in the control page in ``run_dir``, for those whom ``access.Guard`` lets pass."""
    bearer = Depends(HTTPBearer(auto_error=False, description="the sidecar's control token"))
    router = APIRouter(
        prefix="/v1/control", dependencies=[bearer], responses=_REFUSALS, tags=["control"]
    )
    one_writer = threading.Lock()

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Change the policy from the next batch on, on all ranks."""
        with one_writer, _page(store, run_dir) as page:
            page.set_policy(request.policy)
        return PolicyAnswer(policy=request.policy)

    return router


def _page(store: RunStore, run_dir: Path) -> ControlPage:
    """The control page, which ranks read on the host of rank 0 only. Raises ControlError."""
    run = store.poll().readable  # records from before the change are counted before it
    if run is not None and (location := run.header.location).host.start > 0:
        raise ControlError(
            f"the policy of all {location.num_ranks} ranks is set on the first host, "
            f"{location.first_host or 'which holds rank 0'}: ask the sidecar there"
        )
    try:
        return ControlPage.open(run_dir)
    except ControlError as error:
        raise ControlError(
            f"{error}; the engine is still loading, was started with --policy off, or somebody has "
            "deleted its files"
        ) from error
