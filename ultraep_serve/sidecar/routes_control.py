"""What can be changed while serving: policy, pause, threshold, speeds, capture of routing.

While paused the policy is off, and the policy to resume is stored beside the control page.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from ultraep_serve.errors import ControlError, OutputError
from ultraep_serve.sidecar.access import BEARER, REFUSALS, bearers_only
from ultraep_serve.sidecar.statistics.snapshot import Document
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import ControlPage, RecordLevel
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy, SpeedSource, TokenView

__all__ = ["control_routes"]

_MIB = 1 << 20
_PUT_BACK_SECONDS = 3.0  # for a rank to put a deleted control page back
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {
        "description": "no engine to control, nothing to resume, or not the first host's sidecar"
    },
}


class _Control:
    """The control page in ``run_dir``, for one change at a time."""

    def __init__(self, store: RunStore, run_dir: Path) -> None:
        self.store, self.files = store, RunFiles(run_dir)
        self._one_writer = threading.Lock()

    @contextlib.contextmanager
    def page(self) -> Iterator[ControlPage]:
        """The page. Raises ControlError where there is none."""
        with self._one_writer:
            self.store.poll()  # records from before the change are counted before it
            deadline = time.monotonic() + _PUT_BACK_SECONDS
            while self.store.awaits_control() and time.monotonic() < deadline:
                time.sleep(0.05)
            try:
                page = ControlPage.open(self.files.path)
            except ControlError as error:
                raise ControlError(
                    f"{error}; the engine is still loading, or was started with --policy off"
                ) from error
            with page:
                yield page
            self.store.invalidate()

    @contextlib.contextmanager
    def first_hosts_page(self) -> Iterator[ControlPage]:
        """The page for all but captures, which ranks read on the host of rank 0 only.

        Raises ControlError also on the other hosts.
        """
        with self.page() as page:
            location = self.store.run.location
            if location is not None and location.host.start > 0:
                raise ControlError(
                    f"policy, threshold and speeds of all {location.num_ranks} ranks are set on "
                    f"the first host, {location.first_host or 'which holds rank 0'}: ask the "
                    "sidecar there"
                )
            yield page

    def require_room(self, max_bytes: int) -> None:
        """For a capture, in shared memory, which holds more. Raises HTTPException."""
        header = self.store.run.header  # without one there is nothing to capture yet
        ranks = 1
        if header is not None and header.mode == TokenView.OWN.value:
            ranks = header.location.host_size
        free = shutil.disk_usage(self.files.path).free
        if ranks * max_bytes > free:
            raise HTTPException(
                507,
                f"shared memory has {free // _MIB} MiB free, the capture may take "
                f"{ranks * max_bytes // _MIB}",
            )


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PolicyRequest(_Request):
    """The policy to put in force."""

    policy: Policy


class PolicyAnswer(Document):
    """The policy put in force, and how many times one was set."""

    policy: Policy
    sequence: int


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
    control = _Control(store, run_dir)
    _add_policies(router, control, allow_ideal)

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


def _add_policies(router: APIRouter, control: _Control, allow_ideal: bool) -> None:
    def put_in_force(policy: Policy) -> PolicyAnswer:
        with control.first_hosts_page() as page:
            control.files.forget_pause()
            return PolicyAnswer(policy=policy, sequence=page.set_policy(policy))

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Change the policy from the next batch on."""
        if request.policy is Policy.IDEAL and not allow_ideal:
            raise HTTPException(
                403,
                "policy 'ideal' gives wrong answers and is for measuring only; "
                "start the sidecar with --allow-ideal to permit it",
            )
        return put_in_force(request.policy)

    @router.post("/pause")
    def pause() -> PolicyAnswer:
        """Switch balancing off from the next batch on, and store the policy for resume."""
        with control.first_hosts_page() as page:
            known = control.store.run.control.paused
            if policy := known if page.policy is Policy.OFF else page.policy:
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
        return put_in_force(paused)
