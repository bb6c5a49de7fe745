"""Endpoints for operators: health, readiness, metrics, configuration."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict

from ultraep_serve import __version__
from ultraep_serve.files import open_regular
from ultraep_serve.sidecar.statistics.snapshot import SCHEMA_VERSION
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy

__all__ = ["CONFIG_NAME", "Access", "operate_routes"]

CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 1 << 20

Detail = Annotated[bool, Query(description="also series per layer, and more per rank")]


@dataclass(frozen=True)
class Access:
    """Who may change what."""

    token: str | None  # gives access to control; None or empty: nobody has it
    allow_ideal: bool  # permits the policy that gives wrong answers


class Readiness(BaseModel):
    """Whether every rank of this host is alive and ready."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    ready: bool
    reasons: dict[str, str]
    """Why not, by rank; under ``run`` where no rank is known."""
    schema_version: int = SCHEMA_VERSION


class ConfigAnswer(BaseModel):
    """The configuration in force."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: str
    """Of ultraep_serve."""
    policy: str | None
    """Now in force; null where unknown."""
    paused_policy: str | None
    """The policy that resume puts in force again; null while not paused."""
    max_imbalance: float | None
    """Layers at or below it are not balanced. Null: as in config. Only the first host's sidecar
    reports changes of it, and pauses."""
    policies: list[str]
    """Policies that may be put in force."""
    control_open: bool
    """Whether there is a token that gives access to control."""
    config: dict[str, Any] | None
    """The settings at start, without secrets; null where there are none."""
    schema_version: int = SCHEMA_VERSION


def operate_routes(
    store: RunStore,
    registries: tuple[CollectorRegistry, CollectorRegistry],
    run_dir: Path,
    access: Access,
) -> APIRouter:
    """The routes over ``store``; the second of ``registries`` has more metrics than the first."""
    router = APIRouter(tags=["operate"])

    @router.get("/healthz")
    def healthz() -> dict[str, str]:
        """200 while the sidecar itself answers."""
        return {"status": "ok"}

    @router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
    def readyz() -> JSONResponse:
        """200 when every rank of this host is alive and ready, else 503 with the reasons."""
        store.poll()
        problems = store.problems()
        answer = Readiness(ready=not problems, reasons=problems)
        return JSONResponse(answer.model_dump(), status_code=503 if problems else 200)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
    )
    def metrics(request: Request, detail: Detail = False) -> Response:
        """Prometheus metrics, in the format that the client prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registries[detail]), headers={"content-type": content_type})

    @router.get("/v1/config")
    def config() -> ConfigAnswer:
        """The policy in force, the policies that may be set, and the settings at start."""
        store.poll()
        policy, control = store.policy(), store.control()
        return ConfigAnswer(
            version=__version__,
            policy=policy.value if policy else None,
            paused_policy=control.paused.value if control.paused else None,
            max_imbalance=control.max_imbalance,
            policies=[p.value for p in Policy if p is not Policy.IDEAL or access.allow_ideal],
            control_open=bool(access.token),
            config=_read_config(run_dir / CONFIG_NAME),
        )

    return router


def _read_config(path: Path) -> dict[str, Any] | None:
    """The settings in ``path`` without secrets; None where the file is missing or damaged."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            settings = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(settings, dict):
        return None
    return {key: value for key, value in settings.items() if "token" not in key.lower()}
