"""The policy in force: set until further notice, lent for a while, or paused.

While paused the policy is off, and the policy to resume is stored beside the control page. A lease
ends by itself, and the policy that was set before then holds again. Whoever sets a policy without
one ends all leases: an operator is never kept waiting by a benchmark.
"""

import secrets
from datetime import datetime, timezone
from typing import Annotated

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from ultraep_serve.errors import ControlError, OutputError
from ultraep_serve.sidecar.control import Control
from ultraep_serve.sidecar.statistics.snapshot import Document
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.lease import LONGEST_SECONDS, Lease
from ultraep_serve.types import Policy

__all__ = ["policy_routes"]

_IDEAL_SECONDS = 300.0
_OVER = (
    "this lease is over: it was not renewed in time, somebody set a policy, or balancing has "
    "switched itself off"
)

LeaseName = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PolicyRequest(_Request):
    """The policy to put in force."""

    policy: Policy


class PolicyAnswer(Document):
    """The policy put in force, and how many times one was set."""

    policy: Policy
    sequence: int
    lease_seconds: float | None = None
    """After so long the policy from before holds again, as always with ideal; null: it stays."""


class LeaseRequest(_Request):
    """The policy to put in force for a while."""

    policy: Policy
    seconds: float = Field(ge=1.0, le=LONGEST_SECONDS, description="from this request on")
    holder: str = Field(
        "somebody", min_length=1, max_length=100, description="who asks, for those who are refused"
    )
    lease: LeaseName | None = Field(
        None, description="a lease to go on with, also with another policy; null: a new one"
    )


class LeaseAnswer(Document):
    """The policy in force, and for how long."""

    lease: str
    """Its name, which renews and ends it."""
    policy: Policy
    sequence: int
    """How many times one was set."""
    lease_seconds: float


def policy_routes(router: APIRouter, control: Control, allow_ideal: bool) -> None:
    """Add to ``router`` what changes the policy; ``allow_ideal`` permits wrong answers."""

    def permit(policy: Policy) -> None:
        if policy is Policy.IDEAL and not allow_ideal:
            raise HTTPException(
                403,
                "policy 'ideal' gives wrong answers and is for measuring only; "
                "start the sidecar with --allow-ideal to permit it",
            )

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Change the policy from the next batch on, and end leases. Policy ideal is a lease."""
        permit(request.policy)
        return _put_in_force(control, request.policy)

    @router.post("/lease")
    def lease(request: LeaseRequest) -> LeaseAnswer:
        """Change the policy for some seconds, or go on with a lease; 409 while another holds."""
        permit(request.policy)
        with control.first_hosts_page() as page:
            return _lent(page, request)

    @router.delete("/lease/{lease}")
    def end_lease(lease: LeaseName) -> PolicyAnswer:
        """End a lease: the policy from before it holds again."""
        with control.first_hosts_page() as page:
            _require(page, lease)
            sequence = page.set_lease(None)
            return PolicyAnswer(policy=page.policy, sequence=sequence)

    _add_pause(router, control)


def _add_pause(router: APIRouter, control: Control) -> None:
    @router.post("/pause")
    def pause() -> PolicyAnswer:
        """Switch balancing off from the next batch on, and store the policy for resume."""
        with control.first_hosts_page() as page:
            known, set_policy = control.store.run.control.paused, page.policy_without_lease
            if policy := known if set_policy is Policy.OFF else set_policy:
                try:
                    control.files.remember_pause(policy)
                except OutputError as error:
                    raise ControlError(f"cannot pause, set policy off instead: {error}") from error
            return PolicyAnswer(policy=Policy.OFF, sequence=page.set_policy(Policy.OFF))

    @router.post("/resume")
    def resume() -> PolicyAnswer:
        """Put the paused policy in force again."""
        with control.first_hosts_page():
            paused = control.store.run.control.paused
        if paused is None:
            raise ControlError("nothing is paused; set a policy instead")
        return _put_in_force(control, paused)


def _put_in_force(control: Control, policy: Policy) -> PolicyAnswer:
    """Until further notice; where that would be wrong answers, for a while."""
    with control.first_hosts_page() as page:
        if policy is Policy.IDEAL:
            _refuse_in_doubt(page)
            made = Lease.of(secrets.randbits(64), policy, _IDEAL_SECONDS, _since("an operator"))
            sequence = page.set_lease(made)
            return PolicyAnswer(policy=policy, sequence=sequence, lease_seconds=_IDEAL_SECONDS)
        control.files.forget_pause()
        return PolicyAnswer(policy=policy, sequence=page.set_policy(policy))


def _lent(page: ControlPage, request: LeaseRequest) -> LeaseAnswer:
    """Raises ControlError where somebody else has a lease, or this one is over."""
    if request.lease is not None:
        current = _require(page, request.lease)
        number, holder = current.number, current.holder
    else:
        _refuse_in_doubt(page)
        if (other := page.lease) is not None:
            raise ControlError(
                f"policy {other.policy.value} is lent to {other.holder}, for another "
                f"{other.seconds_left:.0f} s unless renewed; try again later, or set a policy "
                "without a lease, which ends that one"
            )
        number, holder = secrets.randbits(64), _since(request.holder)
    made = Lease.of(number, request.policy, request.seconds, holder)
    return LeaseAnswer(
        lease=f"{number:016x}",
        policy=request.policy,
        sequence=page.set_lease(made),
        lease_seconds=request.seconds,
    )


def _require(page: ControlPage, name: str) -> Lease:
    """The lease in force, which must be that one. Raises ControlError."""
    lease = page.lease
    if lease is None or lease.number != int(name, 16):
        raise ControlError(_OVER)
    return lease


def _refuse_in_doubt(page: ControlPage) -> None:
    """A lease would balance where balancing is in doubt. Raises ControlError."""
    if page.is_in_doubt:
        raise ControlError(
            "balancing has switched itself off, because a check failed; see /readyz, and set a "
            "policy without a lease first"
        )


def _since(holder: str) -> str:
    return f"{holder}, since {datetime.now(timezone.utc).isoformat(timespec='seconds')}"
