"""What can be changed while serving: the policy, and capture of routing."""

from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from ultraep_serve.sidecar.access import MAX_BODY_BYTES
from ultraep_serve.sidecar.control import Control
from ultraep_serve.sidecar.statistics.snapshot import Document
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import RecordLevel
from ultraep_serve.types import Policy

__all__ = ["BEARER", "REFUSALS", "control_routes"]

_MIB = 1 << 20
# Names the scheme in the document; ``access.Guard`` checks the token.
BEARER = Depends(HTTPBearer(auto_error=False, description="the sidecar's control token"))
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "the token is missing or wrong"},
    403: {"description": "the sidecar has no token, or the policy needs --allow-ideal"},
    409: {"description": "no engine to control, or not the first host's sidecar"},
    411: {"description": "the length of the body is not stated"},
    413: {"description": f"the body has more than {MAX_BODY_BYTES} bytes"},
}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PolicyRequest(_Request):
    """The policy to put in force."""

    policy: Policy


class PolicyAnswer(Document):
    """The policy put in force, and how many times one was set."""

    policy: Policy
    sequence: int


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


def control_routes(store: RunStore, run_dir: Path, allow_ideal: bool) -> APIRouter:
    """The routes to the control page in ``run_dir``.

    ``allow_ideal`` permits the policy that gives wrong answers.
    """
    router = APIRouter(
        prefix="/v1/control", dependencies=[BEARER], responses=REFUSALS, tags=["control"]
    )
    control = Control(store, run_dir)

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Change the policy from the next batch on, on all ranks."""
        if request.policy is Policy.IDEAL and not allow_ideal:
            raise HTTPException(
                403,
                "policy 'ideal' gives wrong answers and is for measuring only; "
                "start the sidecar with --allow-ideal to permit it",
            )
        with control.first_hosts_page() as page:
            return PolicyAnswer(policy=request.policy, sequence=page.set_policy(request.policy))

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
