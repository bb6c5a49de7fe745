"""Who is still there: ranks of this host by their rings' heartbeats, other hosts by datagrams.

An engine's own collectives may wait for a rank or a host for ever, and no exchange of ours is
reached meanwhile. So the thread of each rank's heartbeat looks once a second. The first rank of
every host sends a datagram to those of all others, the next one where the first stands still, and
what it learns is shown by its ring. Whoever was not heard for the timeout is given up: the reason
goes to every rank, which ends its process.

What is no silence:

- A batch that goes on here needs every rank of the group, so it counts as hearing all of them. If
  batches go on although a host's datagrams have been missing for the timeout, the network drops
  them: that host is not missed until they come again. Without batches nothing tells dropped
  datagrams from a host without power, on which the next batch would wait for ever: it is given up.
- A rank of this host whose process computes is slow, not lost: a library's call may keep Python,
  and so the heartbeat, waiting for long. It has the time that loading has, also where it computes
  for ever; an exchange of loads that waits for it has its own timeout.
- Silence is counted in the watcher's own steps, each of which is short: a watcher that was stopped
  itself, or a machine that was suspended, gives the others as much time as it had before.

A rank that ends by an error of its own is lost at once, but for the time in which the engine ends
by itself; unless its host or another rank was stopped before, which is such errors' usual cause.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ultraep_serve.balance.host_link import MAX_REASON, HostLink, Message, StageMeeting
from ultraep_serve.balance.neighbour import Neighbour
from ultraep_serve.errors import UltraEPError
from ultraep_serve.system.logs import say
from ultraep_serve.system.topology import ONLY_STAGE, Location, PipelineStage
from ultraep_serve.telemetry.recorder import HEARTBEAT_SECONDS, Recorder
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles

__all__ = ["RankWatch"]

_QUIET_SECONDS = 4.0  # of silence before it is shown
_LONGEST_STEP = 2 * HEARTBEAT_SECONDS
_GRACE_SECONDS = 2.0  # for other ranks and hosts to learn the reason
_STOPPED_CODES = (None, 0, 128 + 2, 128 + 15)  # of a process that ends as it was asked
_LOGGER = logging.getLogger(__name__)


@dataclass
class RankWatch:
    """What one rank knows of the others; ``look`` is called at every heartbeat of its ring.

    ``end`` ends the process: its main thread may hang where no exception reaches it.
    """

    run_path: Path
    location: Location
    timeout_seconds: float
    longest_seconds: float  # how long a rank that computes may be silent
    recorder: Recorder
    link: HostLink | None = None  # None: all ranks are on one host
    pipeline: PipelineStage = ONLY_STAGE
    meeting: StageMeeting | None = None  # gives the link later, where there are stages
    end: Callable[[int], object] = os._exit
    _silence: dict[str, float] = field(default_factory=dict)  # seconds by name
    _idle: dict[str, float] = field(
        default_factory=dict
    )  # seconds of silence since it last computed
    _without_datagrams: dict[int, float] = field(default_factory=dict)  # seconds by host
    _not_missed: set[int] = field(default_factory=set)  # hosts whose datagrams do not come
    _warned: set[int] = field(default_factory=set)  # those of them that were warned about
    _gone: set[int] = field(default_factory=set)  # hosts that were stopped
    _reports: dict[int, Message] = field(default_factory=dict)  # the newest by host
    _failed: dict[str, str] = field(default_factory=dict)  # reasons by name
    _has_stopped: bool = False  # whether a rank of this host was stopped
    _progress: int = 0
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._files, location = RunFiles(self.run_path), self.location
        base = self.pipeline.number * location.num_ranks
        self._own = range(base, base + location.num_ranks)  # ring numbers of this stage
        self._neighbours = {
            base + rank: Neighbour(self._files.ring(base + rank))
            for rank in location.host
            if rank != location.rank
        }
        self._limit = self.timeout_seconds + _LONGEST_STEP  # a heartbeat is seen a step late
        self._looked = time.monotonic()
        self._listens = False
        if self.link is not None:
            self._use_link(self.link, location.is_host_primary)

    def _use_link(self, link: HostLink, listens: bool) -> None:
        self.link, self._listens = link, listens
        if listens:
            link.save(self._files.link)

    def look(self) -> None:
        """Hear the others, say what is heard, and end this process where one is given up."""
        if self._is_over:
            return
        now = time.monotonic()
        step = min(now - self._looked, _LONGEST_STEP)
        self._looked = now
        before, self._progress = self._progress, self.recorder.progress
        progresses = self._progress != before
        self._find_other_stages()
        self._meet_other_stages()
        quiet = [number for number in self._neighbours if not self._hears(number, step, progresses)]
        unheard = self._hear_hosts(step, progresses) if self._listens else []
        self._show(quiet, unheard)
        if reason := self._reason():
            self._give_up(reason)
        elif not self._is_over:
            self._speak(quiet, unheard)

    def close(self) -> None:
        """Tell the others that this rank was stopped, or by which error it ends; watch no longer.

        To be called where the process ends.
        """
        was_over, self._is_over = self._is_over, True
        if was_over:
            return
        if self._listens:
            self._receive()
        error = "" if self._stops() else _own_error()
        if error:
            self.recorder.fail(error)
        # Ranks of a host that is lost are stopped by its launcher, which is no leaving.
        reason = self._files.lost_reason() or (
            error and f"rank {self.location.rank} failed: {error}"
        )
        # An engine stops its ranks also where one failed, which its launcher is about to say.
        knows = reason or self._files.is_stopped() or not self._files.has_launcher()
        if self.link is not None and self._listens and knows:
            self.link.say_end(reason[:MAX_REASON])

    def _find_other_stages(self) -> None:
        """Watch ranks of other pipeline stages on this host, as soon as they have a ring."""
        if self.pipeline.num_stages == 1:
            return
        for number in set(self._files.rings()) - set(self._own) - set(self._neighbours):
            found = Neighbour(self._files.ring(number))
            if found.header(reopen=True) is not None:
                self._neighbours[number] = found
            else:
                found.close()

    def _meet_other_stages(self) -> None:
        """Listen to other hosts, once all have loaded. A host is not missed before it was heard."""
        link = self.meeting.link() if self.meeting is not None else None
        if link is not None:
            self._not_missed |= set(link.addresses)
            self._use_link(link, link.members[link.host][0] == self._own[self.location.rank])

    def _hears(self, number: int, step: float, progresses: bool) -> bool:
        """Whether the rank of the ring ``number`` was heard lately."""
        neighbour, name = self._neighbours[number], self._rank_name(number)
        header = neighbour.header(reopen=self._silence.get(name, 0.0) > _LONGEST_STEP)
        is_heard = progresses and number in self._own
        if header is not None:
            is_heard |= neighbour.beats(header)
            if header.state is RingState.STOPPED:
                self._has_stopped = is_heard = True
            elif header.state is RingState.FAILED:
                self._failed[name], is_heard = header.unheard, False
        computes = not is_heard and header is not None and neighbour.computes(header, step)
        return self._count(name, step, is_heard, computes)

    def _receive(self) -> set[int]:
        """Take what other hosts have said; returns those that did."""
        assert self.link is not None
        messages = list(self.link.receive())
        for message in messages:
            if message.host not in self._lost_hosts():  # a host that is lost stays it
                self._reports[message.host] = message
                self._gone |= {message.host} if message.leaves else set()
        return {message.host for message in messages}

    def _lost_hosts(self) -> set[int]:
        return {host for host, message in self._reports.items() if message.lost}

    def _hear_hosts(self, step: float, progresses: bool) -> list[int]:
        """Return the hosts that are not heard."""
        assert self.link is not None
        heard = self._receive() | self._gone
        for host in self.link.addresses:
            seconds = 0.0 if host in heard else self._without_datagrams.get(host, 0.0) + step
            self._without_datagrams[host] = seconds
            if host in heard:
                self._not_missed.discard(host)
                self._warned.discard(host)
            elif progresses and seconds > self._limit:
                self._not_missed.add(host)
            if seconds > self._limit and host in self._not_missed - self._warned:
                self._warned.add(host)
                _LOGGER.warning(
                    "ultraep: UDP from %s does not pass: until it does, a host that is cut off is "
                    "noticed only after the engine's own time",
                    self._name(host),
                )
        heard |= set(self.link.addresses) if progresses else self._not_missed
        return [
            host
            for host in self.link.addresses
            if not self._count(self._name(host), step, host in heard)
        ]

    def _count(self, name: str, step: float, is_heard: bool, computes: bool = False) -> bool:
        """Whether ``name`` was heard lately."""
        silence, idle = self._silence.get(name, 0.0) + step, self._idle.get(name, 0.0) + step
        self._silence[name] = 0.0 if is_heard else silence
        self._idle[name] = 0.0 if is_heard or computes else idle
        return self._silence[name] < _QUIET_SECONDS

    def _rank_name(self, number: int) -> str:
        stage, rank = divmod(number, self.location.num_ranks)
        return f"rank {rank}" + ("" if number in self._own else f" of pipeline stage {stage}")

    def _name(self, host: int) -> str:
        assert self.link is not None
        first = host * self.location.host_size
        ranks = f"ranks {first} to {first + self.location.host_size - 1}"
        if self.link.members:
            ranks = ", ".join(map(self._rank_name, self.link.members[host]))
        return f"host {self.link.addresses[host][0]} ({ranks})"

    def _show(self, quiet: list[int], unheard: list[int]) -> None:
        """Publish on this rank's ring, for the sidecar, who is not heard."""
        silent = [self._rank_name(number) for number in quiet]
        if self.link is not None:
            silent += map(self._name, unheard)
        said = [f"{name} not heard for {self._silence[name]:.0f} s" for name in silent]
        for host, message in self._reports.items():
            if self.link is None or host in unheard or host in self._gone:
                continue
            still = map(self._rank_name, message.quiet)
            said += [f"{rank} stands still on {self._name(host)}" for rank in still]
            if self.link.host in message.unheard:
                said.append(f"{self._name(host)} does not hear this host")
        self.recorder.set_unheard("; ".join(said))

    def _speak(self, quiet: list[int], unheard: list[int]) -> None:
        """Speak for this host, if all its ranks before this one stand still."""
        own = self._own[self.location.rank]
        before = {number for number in self._neighbours if number < own}
        if self.link is not None and before <= set(quiet):
            self.link.send(Message(self.link.host, unheard, quiet, "", False))

    def _stops(self) -> bool:
        """Whether somebody was stopped, so that others may fail for want of them."""
        return self._has_stopped or bool(self._gone) or self._files.is_stopped()

    def _reason(self) -> str:
        """Why this process must end; empty where it need not."""
        if reason := self._files.lost_reason():
            return reason
        for host, message in self._reports.items():
            if message.lost:
                return f"{self._name(host)} ended: {message.lost}"[:MAX_REASON]
        for name, error in self._failed.items():
            if self._silence[name] >= _QUIET_SECONDS and not self._stops():
                return f"{name} failed: {error or 'its log says why'}; restart the engine"
        longest = max(self._limit, self.longest_seconds)
        for name, seconds in self._silence.items():
            if self._idle[name] > self._limit or seconds > longest:
                return f"{name} was not heard for {seconds:.0f} s; restart the engine on all hosts"
        return ""

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        latest = threading.Timer(2 * _GRACE_SECONDS, self.end, (1,))  # a full log pipe may block
        latest.daemon = True
        latest.start()
        try:
            with contextlib.suppress(OSError, UltraEPError):  # no room: the others are told below
                self._files.give_up(reason)
            self.recorder.set_unheard(reason)
            say(f"rank {self.location.rank} ends: {reason}", is_error=True)
            deadline = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < deadline:
                if self.link is not None:
                    self.link.send(Message(self.link.host, [], [], reason, False))
                time.sleep(0.2)
        finally:
            latest.cancel()
            self.end(1)


def _own_error() -> str:
    """The error that ends this process, in one line; empty where it ends as it was asked."""
    error = sys.exc_info()[1]  # of the frames below: finalizers run while it passes
    if isinstance(error, SystemExit) and error.code in _STOPPED_CODES:
        return ""
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
