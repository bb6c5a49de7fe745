"""Endpoints for operators: health, readiness, metrics, configuration."""

from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder

from ultraep_serve import __version__
from ultraep_serve.sidecar.metrics import StoreCollector
from ultraep_serve.sidecar.statistics.snapshot import Document
from ultraep_serve.sidecar.store import Run, RunStore
from ultraep_serve.types import Policy

__all__ = ["operate_routes"]

Detail = Annotated[bool, Query(description="also series per layer, and more per rank")]


class Readiness(Document):
    """Whether the server of this host is as its operator wants it."""

    ready: bool
    status: Literal["ready", "not ready", "unbalanced"]
    """unbalanced: it could not be balanced, and runs all the same, as its operator chose with
    on_unsupported=off; or balancing has switched itself off, because a sample failed."""
    reasons: dict[str, str]
    """Why it is not ready or not balanced, by rank; under ``run`` where no rank is known."""


class ConfigAnswer(Document):
    """The configuration in force."""

    version: str
    """Of ultraep_serve."""
    policy: str | None
    """Now in force; null where unknown."""
    policies: list[str]
    """Policies that may be put in force."""
    control_open: bool
    """Whether there is a token that gives access to control."""
    config: dict[str, Any] | None
    """The settings at start, without secrets; null where there are none."""


def operate_routes(store: RunStore, *, control_open: bool) -> APIRouter:
    """The routes over ``store``; whether ``control_open`` is told."""
    router = APIRouter(tags=["operate"])
    prober = CapacityLimiter(1)  # probes are answered whatever others ask

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
        run = await to_thread.run_sync(store.readiness, limiter=prober)
        is_off = run.ready and bool(run.unbalanced or run.switched_off)
        answer = Readiness(
            ready=run.ready,
            status="unbalanced" if is_off else "ready" if run.ready else "not ready",
            reasons=run.reasons,
        )
        return JSONResponse(answer.model_dump(), status_code=200 if run.ready else 503)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
    )
    def metrics(request: Request, detail: Detail = False) -> Response:
        """Prometheus metrics, in the format that the client prefers."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # it asks for a version that is no number
            encode, content_type = choose_encoder("")
        content = encode(StoreCollector(store, detail))
        return Response(content, headers={"content-type": content_type})

    @router.get("/v1/config")
    def config() -> ConfigAnswer:
        """The policy in force, the policies that may be set, and the settings at start."""
        return _config(store.poll(), control_open)

    return router


def _config(run: Run, control_open: bool) -> ConfigAnswer:
    return ConfigAnswer(
        version=__version__,
        policy=run.policy.value if run.policy else None,
        policies=[p.value for p in Policy if p is not Policy.IDEAL or run.control.allows_ideal],
        control_open=control_open,
        config=run.config,
    )
