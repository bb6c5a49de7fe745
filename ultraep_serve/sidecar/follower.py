"""The rings, followed from poll to poll.

A record is counted once, whichever rank is the primary one: records are told apart by their writer
and sequence number, or batch and layer.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ultraep_serve.errors import RingError
from ultraep_serve.sidecar.memory import (
    OWN_DTYPE,
    RecordWindow,
    SkippedHistory,
    most_records,
)
from ultraep_serve.sidecar.statistics.fold import with_figures
from ultraep_serve.sidecar.statistics.held import RankView, merged
from ultraep_serve.sidecar.statistics.selection import RecordSelection
from ultraep_serve.sidecar.statistics.snapshot import RankHealth
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.ring import RingHeader, RingState
from ultraep_serve.telemetry.run_files import RunFiles

__all__ = ["PrimaryRanks", "RingFollower"]


class RingFollower:
    """The ring of one rank: its header at the last poll and its newest records, without loads."""

    def __init__(self, run_dir: Path, rank: int, max_records: int, timeline: Timeline) -> None:
        """Its times and bytes are added to ``timeline``; nothing is read before a poll.

        ``rank`` counts over pipeline stages.
        """
        self.header: RingHeader | None = None  # None: not readable, for the reason in ``error``
        self.error = "no ring yet"
        self.missed = 0  # records overwritten or damaged before they were read
        self.rank = rank
        self.since_ns = 0  # CLOCK_MONOTONIC, when its writer was first seen
        self._path = RunFiles(run_dir).ring(rank)
        self._max_records = max_records
        self._timeline = timeline
        self._reader: RingReader | None = None
        self._writer: tuple[int, ...] = ()
        self._read_up_to = 0  # sequence number
        self._own = RecordWindow(OWN_DTYPE, 1)

    def poll(self) -> RecordArray | None:
        """Records not seen before, as the ring has them; None where it cannot be read."""
        is_known = self._reader is not None
        try:
            if self._reader is None:
                self._reader = RingReader(self._path)
            poll = self._reader.poll()
        except RingError as error:
            self._lose(error)
            return None
        header, records = poll.header, poll.records
        writer = (header.started_ns, header.pid, header.process_namespace)
        if writer != self._writer:
            self._writer, self.since_ns = writer, time.monotonic_ns()
            self._read_up_to = 0
            self._own = RecordWindow(OWN_DTYPE, most_records(header.shape, self._max_records))
        elif is_known:
            self.missed += poll.missed
        records = records[records["seq"] > self._read_up_to]
        self._read_up_to = header.written
        self.header, self.error = header, ""
        return records

    def keep(self, records: RecordArray) -> None:
        """Keep and count those of the last poll, whose layers count over all stages."""
        own = np.empty(len(records), OWN_DTYPE)
        for name in OWN_DTYPE.names or ():
            own[name] = records[name]
        self._own.append(own)
        self._timeline.add_own(self.rank, own)

    def records(self) -> RecordArray:
        """The newest records, oldest first; not to be changed."""
        return self._own.records()

    def records_with_loads(self) -> RecordArray:
        """Those of ``records`` that the ring still has, as the ring has them. Raises RingError."""
        assert self._reader is not None
        own, records = self.records(), self._reader.recent()
        records = records[np.isin(records["seq"], own["seq"])]
        own = own[np.searchsorted(own["seq"], records["seq"])]
        records["time_ns"], records["layer"] = own["time_ns"], own["layer"]
        return records

    def view(self, now_ns: int, heartbeat_limit_seconds: float, num_ranks: int) -> RankView:
        """The rank at ``now_ns`` (CLOCK_MONOTONIC), in a run of ``num_ranks``."""
        header = self.header
        alive = header is not None and header.alive(now_ns, heartbeat_limit_seconds)
        health = RankHealth(
            rank=self.rank,
            pid=header.pid if header else None,
            state=header.state.name.lower() if header else "missing",
            alive=alive,
            heartbeat_age_seconds=header.heartbeat_age_seconds(now_ns) if header else None,
            last_batch_age_seconds=header.last_batch_age_seconds(now_ns) if header else None,
            lost=header.lost if header else 0,
            problem=_problem(header, alive, now_ns, num_ranks) if header else self.error,
            slot_bytes=header.slot_bytes_reserved if header else 0,
            missed=self.missed,
        )
        return RankView(health, header, self.records())

    def _lose(self, error: RingError) -> None:
        if self._reader is not None:
            self._reader.close()  # an unlinked file keeps its memory while it is open
            self._reader = None
        self.header, self.error = None, str(error)


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


class _Counted(NamedTuple):
    """The last record of a pipeline stage that was counted."""

    batch: int
    layer: int
    at_ns: int  # CLOCK_MONOTONIC, when


class PrimaryRanks:
    """The ranks whose loads and batch counters are shown, one of each pipeline stage.

    All ranks of a stage plan the same. It is the lowest that is alive, else the lowest readable
    one, chosen at every poll.
    """

    def __init__(
        self, timeline: Timeline, max_records: int, heartbeat_limit_seconds: float
    ) -> None:
        """Their records are counted in ``timeline``."""
        self.by_stage: dict[int, int] = {}  # in the order of stages
        self._timeline = timeline
        self._max_records = max_records
        self._limit = heartbeat_limit_seconds
        self._since: dict[int, int] = {}  # ``RingFollower.since_ns`` of each
        self._counted: dict[int, _Counted] = {}  # by stage
        self._records = RecordWindow(OWN_DTYPE, max_records)
        self._skipped = SkippedHistory()

    @property
    def first(self) -> int:
        """That of the first stage which has one; -1 where none has."""
        return next(iter(self.by_stage.values()), -1)

    def follow(self, polls: Mapping[int, RecordArray], rings: Mapping[int, RingFollower]) -> None:
        """Add the new records in ``polls``, by rank, of the ``rings`` that could be read."""
        headers = {rank: header for rank in polls if (header := rings[rank].header)}
        if not headers:
            return
        chosen = self._choose(headers)
        header = headers[next(iter(chosen.values()))]
        since = {stage: rings[rank].since_ns for stage, rank in chosen.items()}
        is_same = (chosen, since) == (self.by_stage, self._since)
        try:
            new = {
                stage: polls[rank] if is_same else rings[rank].records_with_loads()
                for stage, rank in chosen.items()
            }
        except RingError:
            return  # the next poll reports it, or reads all again
        self.by_stage, self._since = chosen, since
        domain_size = header.location.domain_size
        of_stage = {stage: with_figures(part, domain_size) for stage, part in new.items()}
        together = merged(list(of_stage.values()))
        if not is_same:
            most = most_records(header.shape, self._max_records)
            self._records = RecordWindow(together.dtype, most)
            self._skipped = SkippedHistory()
        self._records.append(together)
        self._skipped.observe(time.time_ns(), header)
        for number, (stage, records) in enumerate(of_stage.items()):
            self._count(stage, records, with_batches=not number)

    def _choose(self, headers: Mapping[int, RingHeader]) -> dict[int, int]:
        now_ns = time.monotonic_ns()
        in_order = sorted(headers, key=lambda r: (not headers[r].alive(now_ns, self._limit), r))
        shape = headers[in_order[0]].shape
        chosen: dict[int, int] = {}
        for rank in in_order:
            if headers[rank].shape == shape:  # others are reported as a problem
                chosen.setdefault(headers[rank].pipeline_stage, rank)
        return dict(sorted(chosen.items()))

    def _count(self, stage: int, records: RecordArray, *, with_batches: bool) -> None:
        """Count those of ``records`` that come after the last one counted of ``stage``.

        All ranks number batches alike, so another primary rank repeats records of the last one. A
        run has all its rings before its first record, so a writer that was first seen after the
        last record counted is of a new run.
        """
        batch, layer, at_ns = self._counted.get(stage, _Counted(0, 0, -1))
        is_new_run = self._since[stage] > at_ns
        if not is_new_run:
            later = (records["batch"] == batch) & (records["layer"] > layer)
            records = records[later | (records["batch"] > batch)]
        if not len(records):
            return
        last = records[-1]
        self._counted[stage] = _Counted(int(last["batch"]), int(last["layer"]), time.monotonic_ns())
        if with_batches:
            self._timeline.add_batches(records, of_new_run=is_new_run)
        self._timeline.add(RecordSelection().considered(records))

    def records(self) -> RecordArray:
        """The newest records, oldest first, with loads and figures; not to be changed."""
        return self._records.records()

    def skipped(self) -> RecordArray:
        """As ``SkippedHistory.records``."""
        return self._skipped.records()
