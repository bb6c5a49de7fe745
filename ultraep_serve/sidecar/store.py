"""All that the sidecar knows of a run: the rings, polled in the background and on request."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ultraep_serve.balance.topology import Location
from ultraep_serve.errors import ControlError
from ultraep_serve.sidecar.follower import PrimaryRanks, RingFollower, WallClock, merged
from ultraep_serve.sidecar.health import RankList, ReadinessRead, problem, rank_health
from ultraep_serve.sidecar.statistics.batches import count_batches
from ultraep_serve.sidecar.statistics.selection import RecordSelection
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot, RankView
from ultraep_serve.sidecar.statistics.summary import summarise
from ultraep_serve.sidecar.statistics.timeline import History, Timeline, Totals
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import ALIVE_SECONDS
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Decision, Policy, SpeedSource

__all__ = [
    "ControlState",
    "Held",
    "NoRunError",
    "RunStore",
    "UnbalancedError",
]

_EVERYTHING = RecordSelection()


class ControlState(NamedTuple):
    """The contents of the control page; all None where there is none."""

    policy: Policy | None = None
    max_imbalance: float | None = None  # the threshold set since the start
    paused: Policy | None = None  # the policy that resume puts in force again
    sequence: int = 0  # how many times the policy was set
    speeds: SpeedSource = SpeedSource.CONFIGURED  # set since the start


class NoRunError(Exception):
    """No ring can be read: the engine has not started or has ended."""

    @property
    def document(self) -> dict[str, str]:
        """What is answered instead of a balance."""
        return {"detail": str(self)}


class UnbalancedError(NoRunError):
    """The server runs, but plainly: it could not be balanced, and its operator allowed that."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this server runs without balancing: {reason}")
        self.reason = reason

    @property
    def document(self) -> dict[str, str]:
        """Also for programs."""
        return {"detail": str(self), "status": "unbalanced", "reason": self.reason}


class Held(NamedTuple):
    """The records held at one moment."""

    header: RingHeader  # as ``RunStore.header``
    primary: RecordArray  # the primary ranks' records, with loads
    own: list[RecordArray]  # every rank's, 0 to R-1, without loads; empty for other hosts'


class RunStore:
    """Follows all rings of ``run_dir``; every method may be called from any thread.

    What it has read stays known where files are deleted while ranks still write.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        heartbeat_limit_seconds: float = ALIVE_SECONDS,
        max_records: int = 8192,
        reuse_seconds: float = 0.0,
    ) -> None:
        """Keep ``max_records`` of each rank; read at most once in ``reuse_seconds``."""
        self.timeline = Timeline()
        self._run_dir, self._files = run_dir, RunFiles(run_dir)
        self._limit = heartbeat_limit_seconds
        self._max_records = max_records
        self._rings: dict[int, RingFollower] = {}  # by number, all that were ever found
        self._primary = PrimaryRanks(self.timeline, max_records, heartbeat_limit_seconds)
        self._clock = WallClock()
        self._control = ControlState()
        self._config: dict[str, Any] | None = None
        self._unbalanced = ""
        self._reuse_seconds = reuse_seconds
        self._polls = 0  # begun so far
        self._polled_at = float("-inf")  # monotonic
        self._ready = ReadinessRead({"run": "the rings were not read yet"}, "", time.monotonic())
        self._lock = threading.RLock()

    def poll(self) -> None:
        """Read what is new. Never raises, whatever the files in ``run_dir`` are.

        Concurrent callers share one poll, which began after they called.
        """
        begun = self._polls
        with self._lock:
            now = time.monotonic()
            if self._polls > begun or now - self._polled_at < self._reuse_seconds:
                return
            self._polls, self._polled_at = self._polls + 1, now
            self._poll_rings()
            self._unbalanced = self._files.unbalanced(self._unbalanced)
            location = self.location()
            is_first = location is None or location.host.start == 0
            self._control = self._read_control() if is_first else ControlState()
            if location is None or os.path.lexists(self._files.settings):
                self._config = self._files.config()
            self._ready = ReadinessRead(self.problems(), self._unbalanced, now)

    def readiness(self) -> ReadinessRead:
        """Now; as at the last poll while another thread reads or computes: nobody waits for it."""
        if self._lock.acquire(blocking=False):
            try:
                self.poll()
                return ReadinessRead(self.problems(), self._unbalanced, time.monotonic())
            finally:
                self._lock.release()
        last = self._ready
        age = time.monotonic() - last.read_at
        if age <= self._limit:
            return last
        return last._replace(problems={"run": f"the rings were not read for {age:.0f} s"})

    def invalidate(self) -> None:
        """After a change: the next poll reads, however recent the last one is."""
        with self._lock:
            self._polled_at = float("-inf")

    def policy(self) -> Policy | None:
        """The policy in force from the next batch on; None where unknown."""
        with self._lock:
            header = self._ring(self._primary.first).header
            return self._control.policy or (header.policy if header else None)

    def control(self) -> ControlState:
        """The contents of the control page at the last poll."""
        with self._lock:
            return self._control

    def awaits_control(self) -> bool:
        """Whether the control page was deleted while serving, so that a rank puts it back."""
        with self._lock:
            known = self._control.policy is not None
            return known and not os.path.lexists(self._files.control)

    def config(self) -> dict[str, Any] | None:
        """The settings at start, at the last poll; None where the file is missing or damaged."""
        with self._lock:
            return self._config

    def unbalanced(self) -> str:
        """Why the server runs without balancing; empty where it balances, or nothing runs."""
        with self._lock:
            return self._unbalanced

    def location(self) -> Location | None:
        """The location of the primary rank; None while no ring can be read."""
        with self._lock:
            header = self._ring(self._primary.first).header
            return header.location if header else None

    def header(self) -> RingHeader:
        """The first primary rank's header, with the policy in force and the layers of all stages.

        Raises NoRunError.
        """
        with self._lock:
            if self._unbalanced:
                raise UnbalancedError(self._unbalanced)
            header = self._ring(self._primary.first).header
            if header is None:
                raise NoRunError(f"no ring can be read in {self._run_dir}; is the engine running?")
            primary = [self._ring(rank).header for rank in self._primary.by_stage.values()]
            headers = [own for own in primary if own is not None]
            return replace(
                header,
                policy=self._control.policy or header.policy,
                num_layers=sum(own.num_layers for own in headers),
                layers=tuple(map(sum, zip(*(own.layers for own in headers), strict=True))),
                replicas=sum(own.replicas for own in headers),
            )

    def held(self) -> Held:
        """Header and records. Raises NoRunError."""
        with self._lock:
            header = self.header()
            firsts = self._first_ranks(header)
            own = [
                merged([self._ring(first + rank).records() for first in firsts])
                for rank in range(header.shape.num_ranks)
            ]
            return Held(header, self._primary.records(), own)

    def views(self) -> list[RankView]:
        """One view per rank of this host, stage by stage. Raises NoRunError."""
        now_ns = time.monotonic_ns()
        with self._lock:
            header = self.header()
            firsts = self._first_ranks(header)
            numbers = [first + rank for first in firsts for rank in header.location.host]
            return [self._ring(number).view(now_ns, self._limit) for number in numbers]

    def missed(self) -> dict[int, int]:
        """Records per rank that were overwritten or damaged before they were read."""
        with self._lock:
            return {rank: ring.missed for rank, ring in sorted(self._rings.items())}

    def problems(self) -> dict[str, str]:
        """Why the run is not ready, by rank; empty when it is ready."""
        with self._lock:
            try:
                views = self.views()
            except UnbalancedError as error:
                return {"run": str(error)}
            except NoRunError as error:
                found = {str(rank): ring.error for rank, ring in sorted(self._rings.items())}
                return found or {"run": str(error)}
            return self._problems(views)

    def history(self, now_seconds: int, seconds: int, step: int) -> History:
        """As ``Timeline.history``."""
        with self._lock:
            return self.timeline.history(now_seconds, seconds, step)

    def totals(self, now_ns: int, seconds: int) -> Totals:
        """As ``Timeline.totals``, with the batches that left no records."""
        with self._lock:
            totals = self.timeline.totals(now_ns // 10**9, seconds)
            for decision, skipped in self._primary.skipped_since(now_ns - seconds * 10**9):
                totals.batches[decision] += skipped
            return totals

    def ranks(self) -> RankList:
        """The health of every rank of this host. Raises NoRunError."""
        with self._lock:
            header, views, missed = self.header(), self.views(), self.missed()
            problems = self._problems(views)
        health = [
            rank_health(view, problems.get(str(view.rank), ""), missed.get(view.rank, 0))
            for view in views
        ]
        return RankList(not problems, header.shape.num_ranks, health)

    def snapshot(self, selection: RecordSelection) -> BalanceSnapshot:
        """The balance over ``selection``. Raises NoRunError."""
        with self._lock:
            header, views, primary = self.header(), self.views(), self._primary.records()
            batches = self._batches(selection)
        return summarise(primary, header, views, batches, selection)

    def _batches(self, selection: RecordSelection) -> dict[Decision, int]:
        """Batches of ``selection`` by decision. Raises NoRunError."""
        header = self.header()
        if selection == _EVERYTHING:  # the counters go back further than the records held
            pairs = zip(Decision, header.recorded_batches, header.skipped_batches, strict=True)
            return {decision: recorded + skipped for decision, recorded, skipped in pairs}
        counts = count_batches(selection.recorded(self._primary.records()))
        for decision, skipped in self._primary.skipped_since(selection.since_ns):
            counts[decision] = counts.get(decision, 0) + skipped
        return counts

    def _poll_rings(self) -> None:
        if by_ns := self._clock.set_by_ns():
            self.timeline.shift(round(by_ns / 1e9))
            self._primary.shift(by_ns)
            for ring in self._rings.values():
                ring.shift(by_ns)
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

    def _read_control(self) -> ControlState:
        before = self._control
        try:
            with ControlPage.open(self._run_dir) as page:
                policy, sequence, speeds = page.policy, page.sequence, page.speeds
                threshold = page.max_imbalance_millionths
        except ControlError:
            # An engine without balancing has no page.
            return before if self.location() and self.awaits_control() else ControlState()
        paused = None
        if policy is Policy.OFF:
            paused = self._files.paused_policy()
            if paused is None and sequence == before.sequence:
                paused = before.paused
        return ControlState(policy, threshold / 1e6 or None, paused, sequence, speeds)

    def _ring(self, rank: int) -> RingFollower:
        """The follower of ``rank``; an empty one where no ring was found."""
        return self._rings.get(rank) or self._new_ring(rank)

    def _new_ring(self, rank: int) -> RingFollower:
        return RingFollower(self._run_dir, rank, self._max_records, self.timeline)

    def _first_ranks(self, header: RingHeader) -> list[int]:
        """The number of the first rank of each pipeline stage that has ranks on this host."""
        size = header.shape.num_ranks
        return sorted({number - number % size for number in self._rings})

    def _first_layer(self, header: RingHeader) -> int:
        """How many layers the pipeline stages before that of ``header`` have."""
        known = [ring.header for ring in self._rings.values() if ring.header is not None]
        before = {
            other.pipeline_stage: other.num_layers
            for other in known
            if other.pipeline_stage < header.pipeline_stage
        }
        return sum(before.values())

    def _problems(self, views: list[RankView]) -> dict[str, str]:
        num_ranks = self.header().shape.num_ranks
        found = {
            str(view.rank): problem(view, num_ranks, self._ring(view.rank).error) for view in views
        }
        return {rank: reason for rank, reason in found.items() if reason}
