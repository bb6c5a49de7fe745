"""What can be changed while serving: the policy."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict

from ultraep_serve.sidecar.access import MAX_BODY_BYTES
from ultraep_serve.sidecar.control import Control
from ultraep_serve.sidecar.statistics.snapshot import Document
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy

__all__ = ["BEARER", "REFUSALS", "control_routes"]

# Names the scheme in the document; ``access.Guard`` checks the token.
BEARER = Depends(HTTPBearer(auto_error=False, description="the sidecar's control token"))
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "the token is missing or wrong"},
    403: {"description": "the sidecar has no token"},
    409: {
        "description": "no engine to control, not the first host's sidecar, or policy ideal in a "
        "server that was started without --allow-ideal"
    },
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


def control_routes(store: RunStore, run_dir: Path) -> APIRouter:
    """The routes to the control page in ``run_dir``."""
    router = APIRouter(
        prefix="/v1/control", dependencies=[BEARER], responses=REFUSALS, tags=["control"]
    )
    control = Control(store, run_dir)

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Change the policy from the next batch on, on all ranks."""
        with control.page() as page:
            return PolicyAnswer(policy=request.policy, sequence=page.set_policy(request.policy))

    return router
