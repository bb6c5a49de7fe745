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
from ultraep_serve.telemetry.control import ControlPage, Recording, RecordLevel
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy, SpeedSource, TokenView

__all__ = ["Switches", "control_routes"]

_MIB = 1 << 20
_PUT_BACK_SECONDS = 3.0  # for a rank to put a deleted control page back
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {
        "description": "no engine to control, nothing to resume, or not the first host's sidecar"
    },
}


class Switches:
    """Writes to the control page in ``run_dir``, one change at a time.

    Every method raises ControlError where there is no page, or nothing to do, and HTTPException
    for what is not permitted or has no room.
    """

    def __init__(self, store: RunStore, run_dir: Path, allow_ideal: bool) -> None:
        self._store = store
        self._run_dir, self._files = run_dir, RunFiles(run_dir)
        self._allow_ideal = allow_ideal
        self._one_writer = threading.Lock()

    def set_policy(self, policy: Policy) -> int:
        """Put ``policy`` in force; returns how many times one was set."""
        if policy is Policy.IDEAL and not self._allow_ideal:
            raise HTTPException(
                403,
                "policy 'ideal' gives wrong answers and is for measuring only; "
                "start the sidecar with --allow-ideal to permit it",
            )
        with self._first_hosts_page() as page:
            self._files.forget_pause()
            return page.set_policy(policy)

    def pause(self) -> int:
        """Set the policy to off and store the one in force for ``resume``."""
        with self._first_hosts_page() as page:
            policy = self._store.run.control.paused if page.policy is Policy.OFF else page.policy
            if policy is not None:
                try:
                    self._files.remember_pause(policy)
                except OutputError as error:
                    raise ControlError(f"cannot pause, set policy off instead: {error}") from error
            return page.set_policy(Policy.OFF)

    def resume(self) -> tuple[Policy, int]:
        """Put the paused policy in force again; returns it and how many times one was set."""
        with self._first_hosts_page():
            paused = self._store.run.control.paused
        if paused is None:
            raise ControlError("nothing is paused; set a policy instead")
        return paused, self.set_policy(paused)

    def set_max_imbalance(self, max_imbalance: float | None) -> None:
        """Do not balance layers at or below ``max_imbalance``; None: as at start."""
        with self._first_hosts_page() as page:
            page.set_max_imbalance(max_imbalance)

    def set_speeds(self, source: SpeedSource) -> None:
        """Plan with the speeds of ranks from ``source``."""
        with self._first_hosts_page() as page:
            page.set_speeds(source)

    def capture(self, level: RecordLevel, max_bytes: int) -> Recording:
        """Start a new capture of routing, or end the current one."""
        with self._page() as page:
            if level is not RecordLevel.OFF:
                self._require_room(max_bytes)
            return page.record(level, max_bytes)

    def _require_room(self, max_bytes: int) -> None:
        """In shared memory, which holds more than captures."""
        header = self._store.run.header  # without one there is nothing to capture yet
        ranks = 1
        if header is not None and header.mode == TokenView.OWN.value:
            ranks = header.location.host_size
        free = shutil.disk_usage(self._run_dir).free
        if ranks * max_bytes > free:
            raise HTTPException(
                507,
                f"shared memory has {free // _MIB} MiB free, the capture may take "
                f"{ranks * max_bytes // _MIB}",
            )

    @contextlib.contextmanager
    def _page(self) -> Iterator[ControlPage]:
        with self._one_writer:
            self._store.poll()  # records from before the change are counted before it
            deadline = time.monotonic() + _PUT_BACK_SECONDS
            while self._store.awaits_control() and time.monotonic() < deadline:
                time.sleep(0.05)
            try:
                page = ControlPage.open(self._run_dir)
            except ControlError as error:
                raise ControlError(
                    f"{error}; the engine is still loading, or was started with --policy off"
                ) from error
            with page:
                yield page
            self._store.invalidate()

    @contextlib.contextmanager
    def _first_hosts_page(self) -> Iterator[ControlPage]:
        """The page for all but captures, which ranks read on the host of rank 0 only."""
        with self._page() as page:
            location = self._store.run.location
            if location is not None and location.host.start > 0:
                raise ControlError(
                    f"policy, threshold and speeds of all {location.num_ranks} ranks are set on "
                    f"the first host, {location.first_host or 'which holds rank 0'}: ask the "
                    "sidecar there"
                )
            yield page


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


def control_routes(switches: Switches, token: str | None) -> APIRouter:
    """The routes to ``switches``, for bearers of ``token``."""
    router = APIRouter(
        prefix="/v1/control",
        dependencies=[BEARER],
        route_class=bearers_only(token),
        responses={**REFUSALS, **_CONFLICT},
        tags=["control"],
    )

    @router.post("/policy")
    def set_policy(request: PolicyRequest) -> PolicyAnswer:
        """Change the policy from the next batch on."""
        return PolicyAnswer(policy=request.policy, sequence=switches.set_policy(request.policy))

    @router.post("/pause")
    def pause() -> PolicyAnswer:
        """Switch balancing off from the next batch on, and store the policy for resume."""
        return PolicyAnswer(policy=Policy.OFF, sequence=switches.pause())

    @router.post("/resume")
    def resume() -> PolicyAnswer:
        """Put the paused policy in force again."""
        policy, sequence = switches.resume()
        return PolicyAnswer(policy=policy, sequence=sequence)

    @router.post("/threshold")
    def set_threshold(request: ThresholdRequest) -> ThresholdAnswer:
        """Change the imbalance below which layers are not balanced, from the next batch on."""
        switches.set_max_imbalance(request.max_imbalance)
        return ThresholdAnswer(max_imbalance=request.max_imbalance)

    @router.post("/speeds")
    def set_speeds(request: SpeedsRequest) -> SpeedsAnswer:
        """Plan with equal speeds of ranks, or with those they measure, from the next batch on."""
        switches.set_speeds(SpeedSource(request.speeds or SpeedSource.CONFIGURED))
        return SpeedsAnswer(speeds=request.speeds)

    @router.post("/record", responses={507: {"description": "shared memory has no room for it"}})
    def capture(request: CaptureRequest) -> CaptureAnswer:
        """Capture routing from the next batch on, replacing the last capture; or stop."""
        captured = switches.capture(RecordLevel[request.level.upper()], request.max_bytes)
        return CaptureAnswer(level=request.level, number=captured.number)

    return router
