"""All that the sidecar knows of a run: the rings of its ranks, followed from poll to poll."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ControlError, RingError
from ultraep_serve.sidecar.documents import NoBalance, RankState, Readiness
from ultraep_serve.sidecar.proof import switched_off
from ultraep_serve.sidecar.window import Rows, StageWindow, Totals, considered
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.ring import RingHeader, RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

_NO_RING = "no ring can be read; is the engine running?"


class NoRunError(Exception):
    """There are no figures: no ring can be read, or the server runs unbalanced."""

    def __init__(self, run: "Run") -> None:
        found = run.readiness
        detail = found.reasons["run"] if run.unbalanced else _NO_RING
        super().__init__(detail)
        self.answer = NoBalance(**vars(found), detail=detail)


@dataclass(frozen=True)
class RankView:
    """What is known of one rank of this host."""

    state: RankState
    header: RingHeader | None  # None: its ring cannot be read
    problem: str  # why it is not ready; empty when it is


@dataclass(frozen=True)
class Held:
    """A run whose rings can be read, at one moment."""

    header: RingHeader  # the first primary rank's, with the policy in force and all stages' layers
    ranks: Sequence[RankView]  # of this host, stage by stage
    stages: Mapping[int, Rows]  # the rows held, by pipeline stage
    totals: Totals
    switched_off: str  # why balancing has switched itself off; empty where it has not
    costs: CostModel | None  # by which is decided; None: not measured yet, or not read

    @cached_property
    def headers(self) -> list[RingHeader]:
        """Of the ranks of this host whose rings can be read."""
        return [rank.header for rank in self.ranks if rank.header]

    @cached_property
    def rows(self) -> Rows:
        """Of all stages, oldest first."""
        return Rows.together(list(self.stages.values()))


@dataclass(frozen=True)
class Run:
    """What was known of a run at one moment."""

    problems: dict[str, str]  # why it is not ready, by rank; empty when it is
    policy: Policy | None = None  # in force; None where unknown
    allows_ideal: bool = False  # whether the server was started to be measured with policy ideal
    unbalanced: str = ""  # why it runs without balancing; empty: it balances, or nothing runs
    readable: Held | None = None

    @property
    def readiness(self) -> Readiness:
        """Whether the server of this host is as its operator wants it, and why not.

        Reasons are by rank; under ``run`` where no rank is known.
        """
        ready, reasons = bool(self.unbalanced) or not self.problems, self.problems
        if self.unbalanced:
            reasons = {"run": f"this server runs without balancing: {self.unbalanced}"}
        elif ready and self.readable is not None and self.readable.switched_off:
            reasons = {"run": self.readable.switched_off}
        status: Any = ("unbalanced" if reasons else "ready") if ready else "not ready"
        return Readiness(ready=ready, status=status, reasons=reasons)

    @property
    def policies(self) -> list[str]:
        """Those that may be put in force."""
        return [one.value for one in Policy if one is not Policy.IDEAL or self.allows_ideal]

    def held(self) -> Held:
        """Headers and rows. Raises NoRunError."""
        if self.unbalanced or self.readable is None:
            raise NoRunError(self)
        return self.readable


class RingFollower:
    """The ring of one rank: its header at the last poll, and what has gone wrong."""

    def __init__(self, path: Path, number: int) -> None:
        """``number`` counts over pipeline stages. Nothing is read before a poll."""
        self.header: RingHeader | None = None  # None: not readable, for the reason in ``error``
        self.error = "no ring yet"
        self.has_new_writer = False  # at the last poll, after another one
        self._path, self._number = path, number
        self._reader: RingReader | None = None
        self._writer: tuple[int, ...] = ()
        self._missed = 0  # records overwritten or damaged before they were read

    def poll(self) -> RecordArray | None:
        """Records that were not read before, oldest first; None where the ring cannot be read."""
        is_first, self.has_new_writer = self._reader is None, False
        try:
            self._reader = self._reader or RingReader(self._path)
            poll = self._reader.poll()
        except RingError as error:
            if self._reader is not None:
                self._reader.close()  # a deleted file keeps its memory while it is open
            self._reader = self.header = None
            self.error = str(error)
            return None
        self.header, self.error = poll.header, ""
        writer = (poll.header.started_ns, poll.header.pid, poll.header.process_namespace)
        self.has_new_writer = self._writer not in ((), writer)
        self._writer = writer
        self._missed = 0 if self.has_new_writer else self._missed + (not is_first) * poll.missed
        return poll.records

    def view(self, now_ns: int, num_ranks: int) -> RankView:
        """The rank at ``now_ns`` (CLOCK_MONOTONIC), in a run of ``num_ranks``."""
        header = self.header
        if header is None:
            state = RankState(rank=self._number, missed=self._missed)
            return RankView(state, None, self.error)
        alive = header.alive(now_ns)
        state = RankState(
            rank=self._number,
            pid=header.pid,
            state=header.state.name.lower(),
            alive=alive,
            heartbeat_age_seconds=header.heartbeat_age_seconds(now_ns),
            last_batch_age_seconds=header.last_batch_age_seconds(now_ns),
            lost=header.lost,
            missed=self._missed,
        )
        return RankView(state, header, _problem(header, alive, now_ns, num_ranks))


def _problem(header: RingHeader, alive: bool, now_ns: int, num_ranks: int) -> str:
    """Why the rank of ``header`` is not ready; empty when it is."""
    if header.shape.num_ranks != num_ranks:
        return f"its ring belongs to a run of {header.shape.num_ranks} ranks"
    if header.state != RingState.READY:
        return f"state is {header.state.name.lower()}"
    if header.dead:
        return f"process {header.pid} has died"
    if not alive:
        return f"no heartbeat for {header.heartbeat_age_seconds(now_ns):.1f} s"
    return "".join(filter(str.isprintable, header.unheard))


class RunStore:
    """Follows all rings of ``run_dir``, which need not exist; any thread may poll."""

    def __init__(self, run_dir: Path) -> None:
        self._run = Run({"run": "the rings were not read yet"})  # at the last poll
        self._run_dir, self._files = run_dir, RunFiles(run_dir)
        self._rings: dict[int, RingFollower] = {}  # by number, all that were found
        self._windows: dict[int, StageWindow] = {}  # by pipeline stage
        self._totals = Totals.none()
        self._polls = 0  # begun so far
        self._lock = threading.Lock()

    def poll(self) -> Run:
        """Read what is new. Never raises, whatever the files in ``run_dir`` are.

        Concurrent callers share one poll, which began after they called.
        """
        begun = self._polls
        with self._lock:
            if self._polls > begun:
                return self._run
            self._polls += 1
            self._follow()
            self._run = self._read()
            return self._run

    def _follow(self) -> None:
        for number in self._files.rings():
            if number not in self._rings:
                self._rings[number] = RingFollower(self._files.ring(number), number)
        polled = {number: ring.poll() for number, ring in sorted(self._rings.items())}
        if any(self._rings[number].has_new_writer for number in polled):
            # A run has all its rings before its first record, so these are of the new run alone.
            self._rings = {n: ring for n, ring in self._rings.items() if ring.header}
            self._windows, self._totals = {}, Totals.none()
        for number, ring in self._rings.items():
            records = polled[number]
            if records is not None and len(records) and ring.header is not None:
                self._add(ring.header, records)

    def _add(self, header: RingHeader, records: RecordArray) -> None:
        window = self._windows.get(header.pipeline_stage)
        if window is None:
            window = StageWindow(header, self._first_layer(header))
            self._windows[header.pipeline_stage] = window
        if header.shape == window.shape:  # others are reported as a problem
            new = considered(window.add(header.rank, records))
            self._totals = self._totals.plus(new)

    def _first_layer(self, header: RingHeader) -> int:
        """How many layers the pipeline stages before that of ``header`` have."""
        stages = {
            ring.header.pipeline_stage: ring.header.num_layers
            for ring in self._rings.values()
            if ring.header is not None
        }
        return sum(layers for stage, layers in stages.items() if stage < header.pipeline_stage)

    def _read(self) -> Run:
        """The rings as they were just polled, and the other files."""
        now_ns, unbalanced = time.monotonic_ns(), self._files.unbalanced()
        primary = self._primary(now_ns)
        has_page = not primary or primary[0].location.host.start == 0
        policy, in_doubt, allows_ideal = self._control() if has_page else (None, None, False)
        if not primary:
            problems = {str(n): ring.error for n, ring in sorted(self._rings.items())}
            problems = problems or {"run": _NO_RING}
            return Run(problems, policy, allows_ideal, unbalanced)
        header = _of_all_stages(primary, policy)
        views = self._views(header, now_ns)
        headers = [view.header for view in views if view.header]
        held = Held(
            header=header,
            ranks=views,
            stages={one.pipeline_stage: self._rows(one) for one in primary},
            totals=self._totals,
            switched_off=switched_off(headers, header.policy, in_doubt),
            costs=self._files.costs(),
        )
        problems = {str(view.state.rank): view.problem for view in views if view.problem}
        if has_page and policy is None:
            problems["run"] = "its control page was deleted or damaged; restart the engine"
        return Run(problems, header.policy, allows_ideal, unbalanced, held)

    def _primary(self, now_ns: int) -> list[RingHeader]:
        """Of each stage the header whose counters of batches are shown.

        All ranks of a stage plan the same. It is that of the lowest rank that is alive, else of the
        lowest readable one.
        """
        headers = [ring.header for ring in self._rings.values() if ring.header is not None]
        headers.sort(key=lambda header: (not header.alive(now_ns), header.number))
        chosen: dict[int, RingHeader] = {}
        for header in headers:
            if header.shape == headers[0].shape:
                chosen.setdefault(header.pipeline_stage, header)
        return [chosen[stage] for stage in sorted(chosen)]

    def _rows(self, header: RingHeader) -> Rows:
        """Of the pipeline stage of ``header``; none before its first record."""
        return (self._windows.get(header.pipeline_stage) or StageWindow(header, 0)).rows

    def _views(self, header: RingHeader, now_ns: int) -> list[RankView]:
        size = header.shape.num_ranks
        firsts = sorted({number - number % size for number in self._rings})  # of each stage here
        numbers = [first + rank for first in firsts for rank in header.location.host]
        rings = [self._rings.get(n) or RingFollower(self._files.ring(n), n) for n in numbers]
        return [ring.view(now_ns, size) for ring in rings]

    def _control(self) -> tuple[Policy | None, bool | None, bool]:
        """The policy, whether a failed sample has switched it off, and whether ideal is allowed."""
        try:
            with ControlPage.open(self._run_dir) as page:
                return page.policy, page.is_in_doubt, page.allows_ideal
        except ControlError:  # also an engine without balancing has none
            return None, None, False


def _of_all_stages(headers: Sequence[RingHeader], policy: Policy | None) -> RingHeader:
    """The first of ``headers``, with ``policy`` in force and the layers of all stages."""
    first = headers[0]
    return replace(
        first,
        policy=policy or first.policy,
        num_layers=sum(header.num_layers for header in headers),
        layers=tuple(map(sum, zip(*(header.layers for header in headers), strict=True))),
        replicas=sum(header.replicas for header in headers),
        copied=sum(header.copied for header in headers),
    )
