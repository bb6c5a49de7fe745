"""The one endpoint that changes something: the policy."""

import hmac
import threading
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, HTTPException
from pydantic import BaseModel, ConfigDict

from ultraep_serve.observability import ControlError, ControlPage
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.types import Policy

__all__ = ["control_routes"]


class PolicyRequest(BaseModel):
    """The policy to put in force."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy


class PolicyAnswer(BaseModel):
    """The policy put in force, and how many times it was set."""

    policy: Policy
    sequence: int


def control_routes(
    store: RunStore, run_dir: Path, token: str | None, allow_ideal: bool
) -> APIRouter:
    """The routes over the control page in ``run_dir``, open to bearers of ``token``."""
    router = APIRouter(prefix="/v1/control")
    one_writer = threading.Lock()

    def authorise(authorization: Annotated[str | None, Header()] = None) -> None:
        if not token:
            raise HTTPException(403, "control is closed: the sidecar was started without a token")
        scheme, _, given = (authorization or "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(), token.encode())
        if scheme.lower() != "bearer" or not known:
            raise HTTPException(
                401,
                "send 'Authorization: Bearer TOKEN' with the sidecar's control token",
                {"WWW-Authenticate": "Bearer"},
            )

    @router.post("/policy", dependencies=[Depends(authorise)])
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Switch the policy from the next batch on."""
        if request.policy is Policy.IDEAL and not allow_ideal:
            raise HTTPException(
                403,
                "policy 'ideal' routes tokens to the wrong experts and is for measuring only; "
                "start with --allow-ideal if that is what you want",
            )
        store.poll()  # what came before is counted before the switch
        try:
            with one_writer, ControlPage.open(run_dir) as page:
                return PolicyAnswer(policy=request.policy, sequence=page.set_policy(request.policy))
        except ControlError as error:
            raise HTTPException(
                409, f"{error}; the engine is still loading, or was started with --policy off"
            ) from error

    return router
