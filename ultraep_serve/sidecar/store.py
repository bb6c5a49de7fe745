"""All that the sidecar knows of a run: the rings, polled in the background and on request."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultraep_serve.errors import ControlError
from ultraep_serve.sidecar.follower import PrimaryRanks, RingFollower
from ultraep_serve.sidecar.statistics.held import Held, NoRunError, UnbalancedError
from ultraep_serve.sidecar.statistics.proof import switched_off
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import ALIVE_SECONDS
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

__all__ = ["ControlState", "Run", "RunStore"]


@dataclass(frozen=True)
class ControlState:
    """The contents of the control page; no policy where there is none."""

    policy: Policy | None = None
    in_doubt: bool | None = None  # whether a failed sample has switched the policy off
    allows_ideal: bool = False  # whether the server was started to be measured with policy ideal


_NO_PAGE = ControlState()


@dataclass(frozen=True)
class Run:
    """What was known of a run at one moment; nothing in it changes later."""

    path: Path
    read_at: float  # monotonic
    problems: dict[str, str]  # why it is not ready, by rank; empty when it is
    control: ControlState = _NO_PAGE
    config: dict[str, Any] | None = None  # settings at start; None: missing or damaged
    unbalanced: str = ""  # why it runs without balancing; empty: it balances, or nothing runs
    header: RingHeader | None = None  # as in ``Held``; None: no ring can be read
    readable: Held | None = None

    @property
    def ready(self) -> bool:
        """Whether the server of this host is as its operator wants it."""
        return bool(self.unbalanced) or not self.problems

    @property
    def policy(self) -> Policy | None:
        """The policy in force from the next batch on; None where unknown."""
        return self.header.policy if self.header else self.control.policy

    @property
    def location(self) -> Location | None:
        """The location of the primary rank; None while no ring can be read."""
        return self.header.location if self.header else None

    @property
    def reasons(self) -> dict[str, str]:
        """Why it is not ready or not balanced, by rank; under ``run`` where no rank is known."""
        return self.problems or ({"run": self.switched_off} if self.switched_off else {})

    @property
    def switched_off(self) -> str:
        """Why balancing has switched itself off; empty where it has not."""
        return self.readable.switched_off if self.readable else ""

    def held(self) -> Held:
        """Headers and records. Raises NoRunError."""
        if self.unbalanced:
            raise UnbalancedError(self.unbalanced)
        if self.readable is None:
            raise NoRunError(f"no ring can be read in {self.path}; is the engine running?")
        return self.readable


class RunStore:
    """Follows all rings of ``run_dir``; every method may be called from any thread."""

    def __init__(
        self,
        run_dir: Path,
        *,
        heartbeat_limit_seconds: float = ALIVE_SECONDS,
        max_records: int = 8192,
    ) -> None:
        """Keep ``max_records`` of each rank."""
        # As at the last poll.
        self.run = Run(run_dir, time.monotonic(), {"run": "the rings were not read yet"})
        self._timeline = Timeline()
        self._run_dir, self._files = run_dir, RunFiles(run_dir)
        self._limit = heartbeat_limit_seconds
        self._max_records = max_records
        self._rings: dict[int, RingFollower] = {}  # by number, all that were ever found
        self._primary = PrimaryRanks(self._timeline, max_records, heartbeat_limit_seconds)
        self._polls = 0  # begun so far
        self._lock = threading.RLock()

    def poll(self) -> Run:
        """Read what is new. Never raises, whatever the files in ``run_dir`` are.

        Concurrent callers share one poll, which began after they called.
        """
        begun = self._polls
        with self._lock:
            if self._polls > begun:
                return self.run
            self._polls += 1
            self._poll_rings()
            self.run = self._read(time.monotonic())
            return self.run

    def readiness(self) -> Run:
        """Now; as at the last poll while another thread reads or computes: nobody waits for it."""
        if self._lock.acquire(blocking=False):
            try:
                return self.poll()
            finally:
                self._lock.release()
        last = self.run
        age = time.monotonic() - last.read_at
        if age <= self._limit:
            return last
        return replace(last, problems={"run": f"the rings were not read for {age:.0f} s"})

    @contextlib.contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """The sums over time, which stay as they are meanwhile."""
        with self._lock:
            yield self._timeline

    def _poll_rings(self) -> None:
        for rank in self._files.rings():
            if rank not in self._rings:
                self._rings[rank] = self._new_ring(rank)
        polls = {}
        for rank, ring in sorted(self._rings.items()):  # first stages first
            records = ring.poll()
            if records is None or ring.header is None:
                continue
            records["layer"] += self._first_layer(ring.header)
            ring.keep(records)
            is_primary = rank in self._primary.by_stage.values()  # loads of others are not held
            polls[rank] = records if is_primary else records[:0].copy()
        self._primary.follow(polls, self._rings)

    def _read(self, now: float) -> Run:
        """The rings as they were just polled, and the other files."""
        first = self._ring(self._primary.first).header
        is_first = first is None or first.location.host.start == 0
        run = Run(
            self._run_dir,
            now,
            {},
            control=self._read_control() if is_first else _NO_PAGE,
            config=self._files.config(),
            unbalanced=self._files.unbalanced(),
        )
        if first is not None:
            header = self._header(first, run.control)
            run = replace(run, header=header, readable=self._held(header, run.control))
        return replace(run, problems=self._problems(run))

    def _read_control(self) -> ControlState:
        try:
            with ControlPage.open(self._run_dir) as page:
                return ControlState(page.policy, page.is_in_doubt, page.allows_ideal)
        except ControlError:
            return _NO_PAGE

    def _header(self, first: RingHeader, control: ControlState) -> RingHeader:
        """``first``, with the policy in force and the layers of all stages."""
        primary = [self._ring(rank).header for rank in self._primary.by_stage.values()]
        headers = [header for header in primary if header is not None]
        return replace(
            first,
            policy=control.policy or first.policy,
            num_layers=sum(header.num_layers for header in headers),
            layers=tuple(map(sum, zip(*(header.layers for header in headers), strict=True))),
            replicas=sum(header.replicas for header in headers),
        )

    def _held(self, header: RingHeader, control: ControlState) -> Held:
        now_ns, size = time.monotonic_ns(), header.shape.num_ranks
        firsts = sorted({number - number % size for number in self._rings})  # of each stage here
        numbers = [first + rank for first in firsts for rank in header.location.host]
        views = [self._ring(number).view(now_ns, self._limit, size) for number in numbers]
        headers = [view.header for view in views if view.header]
        return Held(
            header=header,
            views=views,
            switched_off=switched_off(headers, header.policy, control.in_doubt),
            primary=self._primary.records(),
            rings={number: ring.records() for number, ring in self._rings.items()},
            skipped=self._primary.skipped(),
            costs=self._files.costs(),
        )

    def _problems(self, run: Run) -> dict[str, str]:
        try:
            views = run.held().views
        except UnbalancedError as error:
            return {"run": str(error)}
        except NoRunError as error:
            found = {str(rank): ring.error for rank, ring in sorted(self._rings.items())}
            return found or {"run": str(error)}
        found = {str(v.health.rank): v.health.problem for v in views if v.health.problem}
        is_first = run.location is not None and run.location.host.start == 0
        if is_first and run.control.policy is None:
            found["run"] = "its control page was deleted or damaged; restart the engine"
        return found

    def _ring(self, rank: int) -> RingFollower:
        """The follower of ``rank``; an empty one where no ring was found."""
        return self._rings.get(rank) or self._new_ring(rank)

    def _new_ring(self, rank: int) -> RingFollower:
        return RingFollower(self._run_dir, rank, self._max_records, self._timeline)

    def _first_layer(self, header: RingHeader) -> int:
        """How many layers the pipeline stages before that of ``header`` have."""
        known = [ring.header for ring in self._rings.values() if ring.header is not None]
        before = {
            other.pipeline_stage: other.num_layers
            for other in known
            if other.pipeline_stage < header.pipeline_stage
        }
        return sum(before.values())
