"""Who is still there: ranks of this host by their rings' heartbeats, other hosts by datagrams.

An engine's own collectives may wait for a rank or a host for ever, and no exchange of ours is
reached meanwhile. So the thread of each rank's heartbeat looks once a second. The first rank of
every host sends a datagram to those of all others, and what it learns is shown by its ring. Whoever
was not heard for the timeout is given up: the reason goes to every rank, which ends its process.

Silence is counted in the watcher's own steps, each of which is short: a watcher that was stopped
itself, or a machine that was suspended, gives the others as much time as it had before.
"""

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import RingError, UltraEPError
from ultraep_serve.files import write_whole
from ultraep_serve.ring.reader import RingReader
from ultraep_serve.ring.recorder import HEARTBEAT_SECONDS, Recorder
from ultraep_serve.ring.run_directory import LOST_FILE, lost_reason
from ultraep_serve.ring.schema import RingHeader, RingState, ring_path
from ultraep_serve.topology import Location, PipelineStage

__all__ = ["HostLink", "RankWatch", "join_hosts"]

_QUIET_SECONDS = 4.0  # of silence before it is shown
_LONGEST_STEP = 2 * HEARTBEAT_SECONDS
_MEET_SECONDS = 3.0  # for datagrams between all hosts to arrive at start
_GRACE_SECONDS = 2.0  # for other ranks and hosts to learn the reason
_TOKEN_BYTES, _ADDRESS_BYTES, _MAX_BYTES, _MAX_REASON = 16, 64, 65535, 500
_ONLY_STAGE = PipelineStage()
_LOGGER = logging.getLogger(__name__)

Gather = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # rows (R, W) of all ranks' row (W,)


class _Message(NamedTuple):
    """What a host says of itself."""

    host: int
    unheard: list[int]  # hosts that it does not hear
    quiet: list[int]  # ranks of its own that stand still
    lost: str  # why it ends; empty while it does not
    leaves: bool  # it was stopped as its operator wished


class HostLink:
    """Datagrams between the first ranks of all hosts; those without the group's token are ignored.

    They carry no secret but are not encrypted either, as the engine's own traffic is not.
    """

    def __init__(self, meeting_point: str, host: int, num_hosts: int) -> None:
        """``meeting_point`` is an address that this host reaches by the network of the engine.

        Where none can be had, nothing is sent.
        """
        self.host, self.num_hosts = host, num_hosts
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.addresses: dict[int, tuple[str, int]] = {}  # of the other hosts
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, UnicodeError):  # no such host
            family, kind, _, _, place = socket.getaddrinfo(
                meeting_point, 9, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                own = probe.getsockname()[0]
            self._socket = socket.socket(family, kind)
            self._socket.setblocking(False)
            try:
                self._socket.bind((own, 0))
            except OSError:
                self.close()

    @property
    def card(self) -> NDArray[np.int64]:
        """What the others need: token, port (0: none) and address, of fixed width."""
        address, port = self._socket.getsockname()[:2] if self._socket else ("", 0)
        text = address.encode()[:_ADDRESS_BYTES].ljust(_ADDRESS_BYTES, b"\0")
        words = np.frombuffer(self.token + text, np.int64)
        return np.concatenate([words, np.array([port], np.int64)])

    def know(self, cards: NDArray[np.int64]) -> None:
        """The cards of all hosts; the first host's token is the group's."""
        self.token = cards[0].tobytes()[:_TOKEN_BYTES]
        for host, card in enumerate(cards):
            text = card.tobytes()[_TOKEN_BYTES : _TOKEN_BYTES + _ADDRESS_BYTES]
            if host != self.host:
                self.addresses[host] = (text.rstrip(b"\0").decode(), int(card[-1]))

    def send(self, message: _Message) -> None:
        """To all other hosts; what cannot be sent is lost."""
        content = self.token + json.dumps(message._asdict()).encode()
        for address in self.addresses.values():
            if self._socket is not None and address[1]:
                with contextlib.suppress(OSError):
                    self._socket.sendto(content, address)

    def receive(self) -> Iterator[_Message]:
        """What has arrived from the group's other hosts; anything else is dropped."""
        for _ in range(16 * self.num_hosts):  # a flood does not hold up the heartbeat
            if self._socket is None:
                return
            try:
                content = self._socket.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # that an earlier datagram could not be delivered
            if hmac.compare_digest(content[:_TOKEN_BYTES], self.token):
                with contextlib.suppress(
                    ArithmeticError, LookupError, RecursionError, TypeError, ValueError
                ):
                    message = _parse(json.loads(content[_TOKEN_BYTES:]))
                    if message.host in self.addresses:
                        yield message

    def hears_all(self) -> bool:
        """Whether every other host is heard; all hosts call this together, for some seconds."""
        deadline, heard = time.monotonic() + _MEET_SECONDS, {self.host}
        hears_us: set[int] = set()
        while time.monotonic() < deadline:
            unheard = sorted(set(range(self.num_hosts)) - heard)
            self.send(_Message(self.host, unheard, [], "", False))
            for message in self.receive():
                heard.add(message.host)
                if self.host not in message.unheard:
                    hears_us.add(message.host)
            if len(heard) == self.num_hosts and len(hears_us) == self.num_hosts - 1:
                self.send(_Message(self.host, [], [], "", False))
                return True
            time.sleep(0.05)
        return len(heard) == self.num_hosts

    def close(self) -> None:
        """Close the socket; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _parse(values: dict[str, Any]) -> _Message:
    """Raises ValueError, TypeError, KeyError for what no host of the group would send."""
    lost = "".join(letter for letter in str(values["lost"]) if letter.isprintable())
    return _Message(
        host=int(values["host"]),
        unheard=[int(host) for host in values["unheard"]],
        quiet=[int(rank) for rank in values["quiet"]],
        lost=lost[:_MAX_REASON],
        leaves=bool(values["leaves"]),
    )


def join_hosts(location: Location, meeting_point: str, gather: Gather) -> HostLink | None:
    """The link of this rank's host; None on other ranks, and where datagrams do not pass.

    All ranks of all hosts call this together; rank 0 warns where they do not pass.
    """
    size = location.host_size
    link = HostLink(meeting_point, location.rank // size, location.num_ranks // size)
    rows = gather(link.card)
    is_heard = True
    if location.is_host_primary:
        link.know(rows[::size])
        is_heard = link.hears_all()
    answers = gather(np.array([is_heard], np.int64))
    if not answers.all():
        if location.rank == 0:
            deaf = ", ".join(str(rank) for rank in np.flatnonzero(answers[:, 0] == 0))
            _LOGGER.warning(
                "ultraep: UDP does not pass between the hosts (rank %s hears not all of them): a "
                "host that is cut off is noticed only after the engine's own time",
                deaf,
            )
    elif location.is_host_primary:
        return link
    link.close()
    return None


@dataclass
class _Neighbour:
    """Another rank of this host."""

    path: Path
    reader: RingReader | None = None
    heartbeat_ns: int = 0

    def header(self, *, reopen: bool) -> RingHeader | None:
        """Its ring's header; ``reopen`` where another file may have taken the ring's place."""
        with contextlib.suppress(RingError):
            if self.reader is None or reopen:
                fresh = RingReader(self.path)
                self.close()
                self.reader = fresh
        with contextlib.suppress(RingError):
            return self.reader.header() if self.reader else None
        return None

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None


@dataclass
class RankWatch:
    """What one rank knows of the others; ``look`` is called at every heartbeat of its ring.

    ``end`` ends the process: its main thread may hang where no exception reaches it.
    """

    run_path: Path
    location: Location
    timeout_seconds: float
    recorder: Recorder
    link: HostLink | None = None  # of a host's first rank, where there are several hosts
    pipeline: PipelineStage = _ONLY_STAGE
    end: Callable[[int], object] = os._exit
    _silence: dict[str, float] = field(default_factory=dict)  # seconds by name
    _gone: set[int] = field(default_factory=set)  # hosts that were stopped
    _reports: dict[int, _Message] = field(default_factory=dict)  # the newest by host
    _is_over: bool = False

    def __post_init__(self) -> None:
        location = self.location
        base = self.pipeline.number * location.num_ranks
        self._neighbours = {
            rank: _Neighbour(ring_path(self.run_path, base + rank))
            for rank in location.host
            if rank != location.rank
        }
        self._looked = time.monotonic()

    def look(self) -> None:
        """Hear the others, say what is heard, and end this process where one is given up."""
        if self._is_over:
            return
        now = time.monotonic()
        step = min(now - self._looked, _LONGEST_STEP)
        self._looked = now
        quiet = [rank for rank in self._neighbours if not self._hears_rank(rank, step)]
        unheard = self._hear_hosts(step) if self.link else []
        self._show(quiet, unheard)
        if reason := self._reason():
            self._give_up(reason)
        elif self.link is not None and not self._is_over:
            self.link.send(_Message(self.link.host, unheard, quiet, "", False))

    def close(self) -> None:
        """Tell the other hosts that this one was stopped, and watch no longer."""
        was_over, self._is_over = self._is_over, True
        if not was_over and self.link is not None:
            for _ in range(3):
                self.link.send(_Message(self.link.host, [], [], "", True))

    def _hears_rank(self, rank: int, step: float) -> bool:
        neighbour, name = self._neighbours[rank], f"rank {rank}"
        silence = self._silence.get(name, 0.0)
        header = neighbour.header(reopen=silence > _LONGEST_STEP)
        beats = header is not None and header.heartbeat_ns != neighbour.heartbeat_ns
        if header is not None:
            neighbour.heartbeat_ns = header.heartbeat_ns
        stopped = header is not None and header.state is RingState.STOPPED
        return self._count(name, step, beats or stopped)

    def _hear_hosts(self, step: float) -> list[int]:
        """Hosts that are not heard."""
        assert self.link is not None
        messages = list(self.link.receive())
        fresh = {message.host: message for message in messages}
        self._reports |= fresh
        self._gone |= {message.host for message in messages if message.leaves}
        return [
            host
            for host in self.link.addresses
            if not self._count(self._name(host), step, host in fresh or host in self._gone)
        ]

    def _count(self, name: str, step: float, is_heard: bool) -> bool:
        """Whether ``name`` was heard lately."""
        self._silence[name] = 0.0 if is_heard else self._silence.get(name, 0.0) + step
        return self._silence[name] < _QUIET_SECONDS

    def _name(self, host: int) -> str:
        assert self.link is not None
        first = host * self.location.host_size
        ranks = f"{first} to {first + self.location.host_size - 1}"
        return f"host {self.link.addresses[host][0]} (ranks {ranks})"

    def _show(self, quiet: list[int], unheard: list[int]) -> None:
        """On this rank's ring, for the sidecar."""
        silent = [f"rank {rank}" for rank in quiet]
        if self.link is not None:
            silent += map(self._name, unheard)
        said = [f"{name} not heard for {self._silence[name]:.0f} s" for name in silent]
        for host, message in self._reports.items():
            if self.link is None or host in unheard or host in self._gone:
                continue
            said += [f"rank {rank} stands still on {self._name(host)}" for rank in message.quiet]
            if self.link.host in message.unheard:
                said.append(f"{self._name(host)} does not hear this host")
        self.recorder.set_unheard("; ".join(said))

    def _reason(self) -> str:
        """Why this process must end; empty where it need not."""
        if reason := lost_reason(self.run_path):
            return reason
        for host, message in self._reports.items():
            if message.lost:
                return f"{self._name(host)} ended: {message.lost}"[:_MAX_REASON]
        limit = self.timeout_seconds + _LONGEST_STEP  # a heartbeat is seen a step late
        for name, seconds in self._silence.items():
            if seconds > limit:
                return f"{name} was not heard for {seconds:.0f} s; restart the engine on all hosts"
        return ""

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        latest = threading.Timer(2 * _GRACE_SECONDS, self.end, (1,))  # a full log pipe may block
        latest.daemon = True
        latest.start()
        try:
            with contextlib.suppress(OSError, UltraEPError):  # no room: the others are told below
                write_whole(self.run_path / LOST_FILE, reason.encode())
            self.recorder.set_unheard(reason)
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.write(f"ultraep: error: rank {self.location.rank} ends: {reason}\n")
                sys.stderr.flush()
            deadline = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < deadline:
                if self.link is not None:
                    self.link.send(_Message(self.link.host, [], [], reason, False))
                time.sleep(0.2)
        finally:
            latest.cancel()
            self.end(1)
