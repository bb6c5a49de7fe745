"""What can be changed while serving: the policy, threshold, speeds, capture of routing."""

from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ultraep_serve.sidecar.access import BEARER, REFUSALS, bearers_only
from ultraep_serve.sidecar.control import Control
from ultraep_serve.sidecar.routes_policy import policy_routes
from ultraep_serve.sidecar.statistics.snapshot import Document
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import RecordLevel
from ultraep_serve.types import SpeedSource

__all__ = ["control_routes"]

_MIB = 1 << 20
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {
        "description": "no engine to control, nothing to resume, another client's lease or one "
        "that is over, or not the first host's sidecar"
    },
}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ThresholdRequest(_Request):
    """The threshold to put in force."""

    max_imbalance: float | None = Field(
        ge=1.0, le=1000.0, description="layers at or below are not balanced; null: as at start"
    )


class ThresholdAnswer(Document, ThresholdRequest):
    """The threshold put in force; null: the one at start."""


class SpeedsRequest(_Request):
    """Where the speeds of ranks are to come from."""

    speeds: Literal["auto", "equal"] | None = Field(
        description="auto: measured; equal: all alike; null: as at start"
    )


class SpeedsAnswer(Document, SpeedsRequest):
    """Where the speeds of ranks come from; null: as at start."""


class CaptureRequest(_Request):
    """What to capture from the next batch on; ``off`` ends the capture."""

    level: Literal["off", "loads", "tokens"]
    max_bytes: int = Field(
        256 * _MIB, ge=_MIB, le=4096 * _MIB, description="of shared memory per capturing rank"
    )


class CaptureAnswer(Document):
    """The capture's level and number; spools with another number are of another capture."""

    level: Literal["off", "loads", "tokens"]
    number: int


def control_routes(
    store: RunStore, run_dir: Path, token: str | None, allow_ideal: bool
) -> APIRouter:
    """The routes to the control page in ``run_dir``, for bearers of ``token``.

    ``allow_ideal`` permits the policy that gives wrong answers.
    """
    router = APIRouter(
        prefix="/v1/control",
        dependencies=[BEARER],
        route_class=bearers_only(token),
        responses={**REFUSALS, **_CONFLICT},
        tags=["control"],
    )
    control = Control(store, run_dir)
    policy_routes(router, control, allow_ideal)

    @router.post("/threshold")
    def set_threshold(request: ThresholdRequest) -> ThresholdAnswer:
        """Change the imbalance below which layers are not balanced, from the next batch on."""
        with control.first_hosts_page() as page:
            page.set_max_imbalance(request.max_imbalance)
        return ThresholdAnswer(max_imbalance=request.max_imbalance)

    @router.post("/speeds")
    def set_speeds(request: SpeedsRequest) -> SpeedsAnswer:
        """Plan with equal speeds of ranks, or with those they measure, from the next batch on."""
        with control.first_hosts_page() as page:
            page.set_speeds(SpeedSource(request.speeds or SpeedSource.CONFIGURED))
        return SpeedsAnswer(speeds=request.speeds)

    @router.post("/record", responses={507: {"description": "shared memory has no room for it"}})
    def capture(request: CaptureRequest) -> CaptureAnswer:
        """Capture routing from the next batch on, replacing the last capture; or stop."""
        level = RecordLevel[request.level.upper()]
        with control.page() as page:
            if level is not RecordLevel.OFF:
                control.require_room(request.max_bytes)
            captured = page.record(level, request.max_bytes)
        return CaptureAnswer(level=request.level, number=captured.number)

    return router
