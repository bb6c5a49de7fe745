"""The endpoints that change something; what they change is in ``switches``."""

import contextlib
import hmac
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from ultraep_serve.errors import ControlError
from ultraep_serve.ring.control import RecordLevel
from ultraep_serve.ring.schema import SCHEMA_VERSION
from ultraep_serve.sidecar.switches import NotAllowedError, Switches
from ultraep_serve.types import Policy

__all__ = ["bearer_of", "control_routes"]

_MIB = 1 << 20
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "the token is missing or wrong"},
    403: {"description": "control is closed, or the policy needs --allow-ideal"},
    409: {
        "description": "there is no engine to control, or nothing to resume, or another host's "
        "sidecar is the one to ask"
    },
}


_SCHEME = HTTPBearer(auto_error=False, description="the sidecar's control token")
Given = Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]


class PolicyRequest(BaseModel):
    """The policy to put in force."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy


class PolicyAnswer(BaseModel):
    """The policy put in force, and how many times it was set."""

    policy: Policy
    sequence: int
    schema_version: int = SCHEMA_VERSION


class ThresholdRequest(BaseModel):
    """The threshold to put in force."""

    model_config = ConfigDict(extra="forbid")

    max_imbalance: float | None = Field(
        ge=1.0, le=1000.0, description="layers at or below are left alone; null: as at start"
    )


class ThresholdAnswer(BaseModel):
    """The threshold put in force; null: the one at start."""

    max_imbalance: float | None
    schema_version: int = SCHEMA_VERSION


class RecordRequest(BaseModel):
    """What to record from the next batch on; ``off`` ends it."""

    model_config = ConfigDict(extra="forbid")

    level: Literal["off", "loads", "tokens"]
    max_bytes: int = Field(
        256 * _MIB, ge=_MIB, le=4096 * _MIB, description="of shared memory per recording rank"
    )


class RecordAnswer(BaseModel):
    """The recording's level and number; spools of another number are another recording's."""

    level: Literal["off", "loads", "tokens"]
    number: int
    schema_version: int = SCHEMA_VERSION


def bearer_of(token: str | None) -> Callable[[Given], None]:
    """A dependency that lets bearers of ``token`` pass, and nobody where there is none."""

    def authorise(given: Given) -> None:
        if not token:
            raise HTTPException(403, "control is closed: the sidecar was started without a token")
        offered = given.credentials.strip() if given else ""
        if not hmac.compare_digest(offered.encode(), token.encode()):
            raise HTTPException(
                401,
                "send 'Authorization: Bearer TOKEN' with the sidecar's control token",
                {"WWW-Authenticate": "Bearer"},
            )

    return authorise


def control_routes(switches: Switches, token: str | None) -> APIRouter:
    """The routes to ``switches``, open to bearers of ``token``."""
    router = APIRouter(
        prefix="/v1/control",
        dependencies=[Depends(bearer_of(token))],
        responses=_REFUSALS,
        tags=["control"],
    )

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Switch the policy from the next batch on."""
        with _refusals():
            return PolicyAnswer(policy=request.policy, sequence=switches.set_policy(request.policy))

    @router.post("/pause")
    def pause() -> PolicyAnswer:
        """Switch balancing off from the next batch on, and remember the policy for resume."""
        with _refusals():
            return PolicyAnswer(policy=Policy.OFF, sequence=switches.pause())

    @router.post("/resume")
    def resume() -> PolicyAnswer:
        """Put the policy in force again that was paused."""
        with _refusals():
            policy, sequence = switches.resume()
            return PolicyAnswer(policy=policy, sequence=sequence)

    @router.post("/threshold")
    def set_threshold(request: ThresholdRequest) -> ThresholdAnswer:
        """Change from the next batch on which layers are even enough to be left alone."""
        with _refusals():
            switches.set_max_imbalance(request.max_imbalance)
        return ThresholdAnswer(max_imbalance=request.max_imbalance)

    @router.post("/record")
    def record(request: RecordRequest) -> RecordAnswer:
        """Record routing from the next batch on, replacing what was recorded before, or stop."""
        with _refusals():
            recording = switches.record(RecordLevel[request.level.upper()], request.max_bytes)
        return RecordAnswer(level=request.level, number=recording.number)

    return router


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What a switch refuses, as HTTP says it."""
    try:
        yield
    except NotAllowedError as error:
        raise HTTPException(403, str(error)) from error
    except ControlError as error:
        raise HTTPException(409, str(error)) from error
