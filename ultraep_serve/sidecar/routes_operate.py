"""Endpoints for those who operate the service: health, readiness, metrics, configuration."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ultraep_serve import __version__
from ultraep_serve.observability import SCHEMA_VERSION
from ultraep_serve.observability._files import open_regular
from ultraep_serve.sidecar.store import RunStore

__all__ = ["CONFIG_NAME", "operate_routes"]

CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 1 << 20


Detail = Annotated[bool, Query(description="also series per layer, and more per rank")]


def operate_routes(
    store: RunStore, registry: CollectorRegistry, detailed: CollectorRegistry, run_dir: Path
) -> APIRouter:
    """The routes over ``store``; ``detailed`` has the metrics of ``registry`` and more."""
    router = APIRouter()

    @router.get("/healthz")
    def healthz() -> dict[str, str]:
        """The sidecar itself answers."""
        return {"status": "ok"}

    @router.get("/readyz")
    def readyz() -> JSONResponse:
        """200 when every rank is alive and ready, else 503 with what is wrong, by rank."""
        store.poll()
        problems = store.problems()
        answer = {"ready": not problems, "reasons": problems}
        return JSONResponse(answer, status_code=503 if problems else 200)

    @router.get("/metrics")
    def metrics(request: Request, detail: Detail = False) -> Response:
        """Prometheus metrics, in the format that the client prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        text = encode(detailed if detail else registry)
        return Response(text, headers={"content-type": content_type})

    @router.get("/v1/config")
    def config() -> dict[str, Any]:
        """The policy in force and the settings at start; null where there are none."""
        store.poll()
        policy = store.policy()
        return {
            "schema_version": SCHEMA_VERSION,
            "version": __version__,
            "policy": policy.value if policy else None,
            "config": _read_config(run_dir / CONFIG_NAME),
        }

    return router


def _read_config(path: Path) -> dict[str, Any] | None:
    """The settings in ``path`` without anything secret; None when there are none to show."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            settings = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(settings, dict):
        return None
    return {key: value for key, value in settings.items() if "token" not in key.lower()}
