"""What the sidecar knows of a run: every rank's ring, polled in the background and on request."""

import os
import re
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ultraep_serve.observability import (
    BalanceSnapshot,
    ControlError,
    ControlPage,
    Poll,
    RankView,
    RingError,
    RingHeader,
    RingReader,
    RingState,
    Window,
    ring_path,
    summarise,
)
from ultraep_serve.observability.batches import count_batches
from ultraep_serve.observability.schema import RecordArray, record_dtype
from ultraep_serve.sidecar.health import RankList, rank_health
from ultraep_serve.sidecar.paused import paused_policy
from ultraep_serve.sidecar.tally import Tally
from ultraep_serve.sidecar.timeline import History, Timeline, Totals
from ultraep_serve.sidecar.windows import OWN_DTYPE, RecordWindow, SkippedHistory, own_fields
from ultraep_serve.types import Decision, ExpertShape, Policy

__all__ = ["ControlState", "Held", "NoRunError", "RunStore"]

_RING_NAME = re.compile(r"ring-(0|[1-9]\d{0,3})")
_EVERYTHING = Window()
_MAX_BYTES = 64 << 20  # of records of all ranks; fewer are held where they are large


class NoRunError(Exception):
    """No ring can be read: the engine has not started, or is gone."""


class Held(NamedTuple):
    """What is held at one moment."""

    header: RingHeader  # the lead rank's
    lead: RecordArray  # the lead rank's records, with loads
    own: list[RecordArray]  # every rank's, 0 to R-1, without loads


class ControlState(NamedTuple):
    """What the control page says; all None where there is none."""

    policy: Policy | None = None
    max_imbalance: float | None = None  # the threshold set since the start
    paused: Policy | None = None  # what resume puts in force again


@dataclass
class _Rank:
    """One rank's ring as last polled."""

    own: RecordWindow = field(default_factory=lambda: RecordWindow(OWN_DTYPE, 1))
    reader: RingReader | None = None
    header: RingHeader | None = None  # None: not readable, ``error`` says why
    error: str = ""
    missed: int = 0
    counted_ns: int = 0  # wall clock of the last record that the timeline has


class RunStore:
    """Follows all rings of ``run_dir``; every method may be called from any thread."""

    def __init__(
        self,
        run_dir: Path,
        *,
        heartbeat_limit_seconds: float = 5.0,
        max_records: int = 8192,
        reuse_seconds: float = 0.0,
    ) -> None:
        """``max_records`` bounds what is kept of each rank, ``reuse_seconds`` how often is read."""
        self._run_dir = run_dir
        self._limit = heartbeat_limit_seconds
        self._max_records = max_records
        self._ranks: dict[int, _Rank] = {}
        self._control = ControlState()
        self._lead = -1  # the rank whose loads are shown
        self._lead_records = RecordWindow(OWN_DTYPE, max_records)
        self._skipped = SkippedHistory()
        self._reuse_seconds = reuse_seconds
        self._polls = 0  # begun so far
        self._polled_at = float("-inf")  # monotonic
        self._lock = threading.RLock()
        self.timeline = Timeline()
        self.tally = Tally(self.timeline)

    def poll(self) -> None:
        """Read what is new. Never raises for what lies in ``run_dir``.

        Callers who wait for each other share a poll: one that began after they asked.
        """
        asked = self._polls
        with self._lock:
            now = time.monotonic()
            if self._polls > asked or now - self._polled_at < self._reuse_seconds:
                return
            self._polls, self._polled_at = self._polls + 1, now
            for rank in self._discover():
                if rank not in self._ranks:
                    self._ranks[rank] = _Rank()
            polls = {rank: self._poll_rank(rank, held) for rank, held in self._ranks.items()}
            self._follow_lead({rank: poll for rank, poll in polls.items() if poll})
            self._control = self._read_control()

    def outdate(self) -> None:
        """Something was just changed: the next poll reads, however recent the last one is."""
        with self._lock:
            self._polled_at = float("-inf")

    def policy(self) -> Policy | None:
        """The policy in force from the next batch on; None where nobody says."""
        with self._lock:
            held = self._ranks.get(self._lead)
            written = held.header.policy if held and held.header else None
            return self._control.policy or written

    def control(self) -> ControlState:
        """What was set through the control page."""
        with self._lock:
            return self._control

    def header(self) -> RingHeader:
        """The lead rank's header, with the policy in force. Raises NoRunError."""
        with self._lock:
            held = self._ranks.get(self._lead)
            if held is None or held.header is None:
                raise NoRunError(f"no ring can be read in {self._run_dir}; is the engine running?")
            return replace(held.header, policy=self._control.policy or held.header.policy)

    def held(self) -> Held:
        """Header and records. Raises NoRunError."""
        with self._lock:
            header = self.header()
            own = [self._own(rank).records() for rank in range(header.shape.num_ranks)]
            return Held(header, self._lead_records.records(), own)

    def views(self) -> list[RankView]:
        """One view per rank, 0 to R-1. Raises NoRunError."""
        now_ns = time.monotonic_ns()
        with self._lock:
            return [self._view(rank, now_ns) for rank in range(self.header().shape.num_ranks)]

    def missed(self) -> dict[int, int]:
        """Records per rank that were overwritten or damaged before they were read."""
        with self._lock:
            return {rank: held.missed for rank, held in sorted(self._ranks.items())}

    def problems(self) -> dict[str, str]:
        """What keeps the run from being ready, by rank; empty when it is ready."""
        with self._lock:
            try:
                views = self.views()
            except NoRunError as error:
                found = {str(rank): held.error for rank, held in sorted(self._ranks.items())}
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
            for decision, skipped in self._skipped.since(now_ns - seconds * 10**9):
                totals.batches[decision] += skipped
            return totals

    def ranks(self) -> RankList:
        """The health of every rank. Raises NoRunError."""
        with self._lock:
            views, missed = self.views(), self.missed()
            problems = self._problems(views)
        health = [
            rank_health(view, problems.get(str(view.rank), ""), missed.get(view.rank, 0))
            for view in views
        ]
        return RankList(not problems, health)

    def snapshot(self, window: Window) -> BalanceSnapshot:
        """The balance over ``window``. Raises NoRunError."""
        with self._lock:
            header, views, lead = self.header(), self.views(), self._lead_records.records()
            batches = self.batches(window)
        return summarise(lead, header, views, batches, window)

    def batches(self, window: Window) -> dict[Decision, int]:
        """Batches of ``window`` by decision. Raises NoRunError."""
        with self._lock:
            header = self.header()
            if window == _EVERYTHING:  # the counters know more than the records held
                pairs = zip(Decision, header.recorded_batches, header.skipped_batches, strict=True)
                return {decision: recorded + skipped for decision, recorded, skipped in pairs}
            counts = count_batches(window.recorded(self._lead_records.records()))
            for decision, skipped in self._skipped.since(window.since_ns):
                counts[decision] = counts.get(decision, 0) + skipped
            return counts

    def _discover(self) -> list[int]:
        try:
            names = os.listdir(self._run_dir)
        except OSError:
            return []  # every known rank then reports on its own that its ring is gone
        return [int(found[1]) for name in names if (found := _RING_NAME.fullmatch(name))]

    def _read_control(self) -> ControlState:
        try:
            with ControlPage.open(self._run_dir) as page:
                policy, threshold = page.policy, page.max_imbalance_millionths
        except ControlError:
            return ControlState()  # an engine without balancing has no page
        paused = paused_policy(self._run_dir) if policy is Policy.OFF else None
        return ControlState(policy, threshold / 1e6 or None, paused)

    def _poll_rank(self, rank: int, held: _Rank) -> Poll | None:
        fresh = held.reader is None
        try:
            if held.reader is None:
                held.reader = RingReader(ring_path(self._run_dir, rank))
            poll = held.reader.poll()
        except RingError as error:
            if held.reader is not None:
                held.reader.close()  # an unlinked file keeps its memory while it is held open
                held.reader = None
            held.header, held.error = None, str(error)
            return None
        fresh = fresh or poll.replaced
        if fresh:
            held.own = RecordWindow(OWN_DTYPE, self._most_records(poll.header.shape))
        else:
            held.missed += poll.missed
        own = own_fields(poll.records)
        held.own.append(own)
        self._count_times(rank, held, own)
        held.header, held.error = poll.header, ""
        # Loads are large: of ranks that do not lead they are let go at once.
        records = poll.records if rank == self._lead else poll.records[:0].copy()
        return Poll(poll.header, records, poll.missed, fresh)

    def _count_times(self, rank: int, held: _Rank, records: RecordArray) -> None:
        new = records[records["time_ns"] > np.uint64(held.counted_ns)]
        if len(new):
            held.counted_ns = int(new["time_ns"][-1])
            self.timeline.add_own(rank, new)

    def _follow_lead(self, polls: dict[int, Poll]) -> None:
        """Take loads and counters from the lowest living rank, else from the lowest readable."""
        if not polls:
            return
        now_ns = time.monotonic_ns()
        lead = min(polls, key=lambda r: (not polls[r].header.alive(now_ns, self._limit), r))
        poll = polls[lead]
        if lead != self._lead or poll.replaced:
            self._lead = lead
            shape = poll.header.shape
            self._lead_records = RecordWindow(record_dtype(shape), self._most_records(shape))
            self._skipped.clear()
            new = self._held_by_ring(lead, poll)
        else:
            new = poll.records
        self._lead_records.append(new)
        self._skipped.observe(time.time_ns(), poll.header)
        self.tally.observe(new, poll.header.started_ns)

    def _most_records(self, shape: ExpertShape) -> int:
        """To be kept of each rank, that all of them together stay in bounds."""
        size = record_dtype(shape).itemsize + shape.num_ranks * OWN_DTYPE.itemsize
        return max(1, min(self._max_records, _MAX_BYTES // size))

    def _held_by_ring(self, rank: int, poll: Poll) -> RecordArray:
        """What a new lead wrote up to ``poll``; its loads were not kept until now."""
        reader = self._ranks[rank].reader
        assert reader is not None
        try:
            records = reader.recent()
        except RingError:
            return poll.records  # the next poll reports what is wrong with the file
        return records[records["seq"] <= poll.header.written]

    def _view(self, rank: int, now_ns: int) -> RankView:
        held = self._ranks.get(rank)
        if held is None or held.header is None:
            return RankView(rank, None, False, None, self._own(rank).records())
        header = held.header
        age = header.heartbeat_age_seconds(now_ns)
        return RankView(
            rank,
            header,
            header.alive(now_ns, self._limit),
            age,
            held.own.records(),
            header.last_batch_age_seconds(now_ns),
        )

    def _own(self, rank: int) -> RecordWindow:
        return (self._ranks.get(rank) or _Rank()).own

    def _problems(self, views: list[RankView]) -> dict[str, str]:
        found = {str(view.rank): self._problem(view, len(views)) for view in views}
        return {rank: problem for rank, problem in found.items() if problem}

    def _problem(self, view: RankView, num_ranks: int) -> str:
        if view.header is None:
            held = self._ranks.get(view.rank)
            return held.error if held else "no ring yet"
        if view.header.shape.num_ranks != num_ranks:
            return f"its ring belongs to a run of {view.header.shape.num_ranks} ranks"
        if view.header.state != RingState.READY:
            return f"state is {view.header.state.name.lower()}"
        if view.header.dead:
            return f"process {view.header.pid} has died"
        if not view.alive:
            return f"no heartbeat for {view.heartbeat_age_seconds:.1f} s"
        return ""
