"""Datagrams between hosts: who is there, and why a host ends.

Every rank has a link, so that another can speak for a host whose first rank cannot; the first
rank's alone receives. A launcher speaks by ``tell_hosts`` for ranks that were killed.

The network may lose, repeat, reorder and make up datagrams. So each begins with the group's name,
by which the kernel drops strangers, and with the HMAC of what follows, by the key that the engine's
own collective brought. It says when it was sent, by the clock that all processes of its host have:
one that tells of life counts if it is the newest, why a host ends is true whenever it comes.
"""

import contextlib
import ctypes
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import OutputError
from ultraep_serve.system.files import open_regular, write_whole
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.run_files import RunFiles

__all__ = [
    "MAX_REASON",
    "HostLink",
    "KeyValueStore",
    "Message",
    "StageMeeting",
    "join_hosts",
    "tell_hosts",
]

MAX_REASON = 500  # letters
_MEET_SECONDS = 3.0  # for datagrams between all hosts to arrive at start
_TIMES = 3  # that the last word is sent
_DRAIN_SECONDS = 0.2  # of the second between heartbeats
_STORE_SECONDS = 0.5  # between two looks into the engine's store
_SO_ATTACH_FILTER, _UDP_HEADER_BYTES = 26, 8
# What Linux lets anybody ask for; it sets twice as much aside. A heartbeat takes 832 bytes of it,
# so those of 512 hosts, which is as many as ranks can be on hosts of 8, wait there for a look.
_BUFFER_BYTES = 212992
_KEY_BYTES, _ADDRESS_BYTES, _MAX_BYTES, _MAX_FILE = 32, 64, 65535, 1 << 20
_GROUP_BYTES, _MAC, _MAC_BYTES = 16, "sha256", 32
_CONTENT = _GROUP_BYTES + _MAC_BYTES  # begins there
_LOGGER = logging.getLogger(__name__)

Gather = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # rows (R, W) of all ranks' row (W,)


class Message(NamedTuple):
    """What a host says of itself."""

    host: int
    unheard: list[int]  # hosts that it does not hear
    quiet: list[int]  # ranks of its own that stand still, by the numbers of their rings
    lost: str  # why it ends; empty while it does not
    leaves: bool  # it was stopped as its operator wished

    @property
    def is_last(self) -> bool:
        """Whether the host ends."""
        return bool(self.lost) or self.leaves


class HostLink:
    """Datagrams to the first ranks of all hosts; those that none of the group sealed are ignored.

    They carry no secret and are not encrypted, as the engine's own traffic is not.
    """

    def __init__(self, meeting_point: str, host: int, num_hosts: int) -> None:
        """``meeting_point`` is an address that this host reaches by the network of the engine.

        Where none can be had, nothing is sent.
        """
        self.host, self.num_hosts = host, num_hosts
        self.members: list[list[int]] = []  # by host, numbers of rings; empty: equally many each
        self.key = secrets.token_bytes(_KEY_BYTES)
        self.addresses: dict[int, tuple[str, int]] = {}  # of the other hosts
        self._newest: dict[int, int] = {}  # when it was sent, by host, in its own nanoseconds
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
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            try:
                self._socket.bind((own, 0))
            except OSError:
                self.close()

    @property
    def endpoint(self) -> NDArray[np.int64]:
        """What the others need: key, address and port (0: none), of fixed width."""
        address, port = self._socket.getsockname()[:2] if self._socket else ("", 0)
        text = address.encode()[:_ADDRESS_BYTES].ljust(_ADDRESS_BYTES, b"\0")
        words = np.frombuffer(self.key + text, np.int64)
        return np.concatenate([words, np.array([port], np.int64)])

    def join(self, endpoints: NDArray[np.int64]) -> None:
        """Take the endpoints of all hosts; the first host's key is the group's."""
        self.key = endpoints[0].tobytes()[:_KEY_BYTES]
        if self._socket is not None:
            _drop_strangers(self._socket, self._group)
        for host, endpoint in enumerate(endpoints):
            text = endpoint.tobytes()[_KEY_BYTES : _KEY_BYTES + _ADDRESS_BYTES]
            if host != self.host:
                self.addresses[host] = (text.rstrip(b"\0").decode(), int(endpoint[-1]))

    def save(self, path: Path) -> None:
        """Leave what ``tell_hosts`` needs; without room there, only ranks speak for this host."""
        values = {"key": self.key.hex(), "host": self.host, "addresses": self.addresses}
        with contextlib.suppress(OutputError):
            write_whole(path, json.dumps(values).encode())

    def send(self, message: Message) -> None:
        """Send ``message`` to all other hosts; what cannot be sent is lost."""
        datagram = self.sealed({**message._asdict(), "sent": time.monotonic_ns()})
        for address in self.addresses.values():
            if self._socket is not None and address[1]:
                with contextlib.suppress(OSError):
                    self._socket.sendto(datagram, address)

    def sealed(self, values: object) -> bytes:
        """A datagram that the group believes."""
        content = json.dumps(values).encode()
        return self._group + hmac.digest(self.key, content, _MAC) + content

    def receive(self) -> Iterator[Message]:
        """What has arrived from the group's other hosts; anything else is dropped."""
        deadline = time.perf_counter() + _DRAIN_SECONDS  # a flood does not hold up the heartbeat
        group = self._group
        while self._socket is not None and time.perf_counter() < deadline:
            try:
                datagram = self._socket.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # that an earlier datagram could not be delivered
            if not datagram.startswith(group):
                continue
            mac, content = datagram[_GROUP_BYTES:][:_MAC_BYTES], datagram[_CONTENT:]
            if hmac.compare_digest(mac, hmac.digest(self.key, content, _MAC)):
                with contextlib.suppress(
                    ArithmeticError, LookupError, RecursionError, TypeError, ValueError
                ):
                    message, sent = _parse(json.loads(content))
                    if message.host in self.addresses and self._counts(message, sent):
                        yield message

    def _counts(self, message: Message, sent: int) -> bool:
        """Whether it tells anything: somebody may have kept and repeated what is older."""
        is_newest = sent > self._newest.get(message.host, -1)
        if is_newest:
            self._newest[message.host] = sent
        return is_newest or message.is_last

    @property
    def _group(self) -> bytes:
        """Name of the group, which everybody on the network sees."""
        return hmac.digest(self.key, b"group", _MAC)[:_GROUP_BYTES]

    def hears_all(self) -> bool:
        """Whether every other host is heard; all hosts call this together, for some seconds."""
        deadline, heard = time.monotonic() + _MEET_SECONDS, {self.host}
        hears_us: set[int] = set()
        while time.monotonic() < deadline:
            unheard = sorted(set(range(self.num_hosts)) - heard)
            self.send(Message(self.host, unheard, [], "", False))
            for message in self.receive():
                heard.add(message.host)
                if self.host not in message.unheard:
                    hears_us.add(message.host)
            if len(heard) == self.num_hosts and len(hears_us) == self.num_hosts - 1:
                self.send(Message(self.host, [], [], "", False))
                return True
            time.sleep(0.05)
        return len(heard) == self.num_hosts

    def say_end(self, lost: str) -> None:
        """Say for the last time, and more than once, why this host ends; empty: as it was asked."""
        for _ in range(_TIMES):
            self.send(Message(self.host, [], [], lost, not lost))

    def close(self) -> None:
        """Close the socket; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _drop_strangers(link: socket.socket, group: bytes) -> None:
    """Have the kernel drop datagrams without ``group``, so that they take no room from others.

    A program of the classic packet filter: compare the words behind the header of UDP. Where it is
    refused, strangers are dropped as they are read.
    """
    load, unlike, give_back = 0x20, 0x15, 0x06
    words = struct.unpack(f">{_GROUP_BYTES // 4}I", group)
    program = b""
    for index, word in enumerate(words):
        to_the_end = 2 * (len(words) - index) - 1
        program += struct.pack("HBBI", load, 0, 0, _UDP_HEADER_BYTES + 4 * index)
        program += struct.pack("HBBI", unlike, 0, to_the_end, word)
    program += struct.pack("HBBI", give_back, 0, 0, _MAX_BYTES)
    program += struct.pack("HBBI", give_back, 0, 0, 0)
    code = ctypes.create_string_buffer(program, len(program))
    with contextlib.suppress(OSError):
        described = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
        link.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


def _parse(values: dict[str, Any]) -> tuple[Message, int]:
    """A message and when it was sent.

    Raises ValueError, TypeError, KeyError for what no host of the group would send.
    """
    lost = "".join(letter for letter in str(values["lost"]) if letter.isprintable())
    message = Message(
        host=int(values["host"]),
        unheard=[int(host) for host in values["unheard"]],
        quiet=[int(rank) for rank in values["quiet"]],
        lost=lost[:MAX_REASON],
        leaves=bool(values["leaves"]),
    )
    return message, int(values["sent"])


def join_hosts(location: Location, meeting_point: str, gather: Gather) -> HostLink | None:
    """This rank's link, which knows the first ranks' of all hosts; None where no datagram passes.

    All ranks of all hosts call this together; rank 0 warns where they do not pass.
    """
    size = location.host_size
    link = HostLink(meeting_point, location.rank // size, location.num_ranks // size)
    rows = gather(link.endpoint)
    link.join(rows[::size])
    is_heard = link.hears_all() if location.is_host_primary else True
    answers = gather(np.array([is_heard], np.int64))
    if not answers.all():
        if location.rank == 0:
            deaf = ", ".join(str(rank) for rank in np.flatnonzero(answers[:, 0] == 0))
            _LOGGER.warning(
                "ultraep: UDP does not pass between the hosts (rank %s hears not all of them): a "
                "host that is cut off is noticed only after the engine's own time",
                deaf,
            )
        link.close()
        return None
    return link


class KeyValueStore(Protocol):
    """What torch calls a Store."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""


class StageMeeting:
    """Where ranks of all stages of a pipeline learn of each other's hosts.

    Each stage has a process group of its own, so endpoints lie in the engine's key-value store. It
    may stand still for long with the host that keeps it, so a thread waits for it.
    """

    def __init__(
        self, store: KeyValueStore, number: int, num_ranks: int, identity: int, meeting_point: str
    ) -> None:
        """Leave the endpoint of the rank with ring ``number``, of ``num_ranks`` in all stages.

        ``identity`` tells its host from others. Raises RuntimeError where the store is gone.
        """
        self._store, self._number = store, number
        self._keys = [f"ultraep-link-{each}" for each in range(num_ranks)]
        self._link: HostLink | None = HostLink(meeting_point, 0, num_ranks)
        store.set(self._keys[number], json.dumps([identity, self._link.endpoint.tolist()]))
        self._endpoints: list[tuple[int, list[int]]] = []  # of all ranks, with their hosts
        threading.Thread(target=self._gather_endpoints, daemon=True).start()

    def _gather_endpoints(self) -> None:
        while not self._endpoints:
            with contextlib.suppress(RuntimeError):  # torch's, where the store cannot be reached
                if self._store.check(self._keys):
                    self._endpoints = [json.loads(self._store.get(key)) for key in self._keys]
                    return
            time.sleep(_STORE_SECONDS)

    def link(self) -> HostLink | None:
        """This rank's link, once, when every rank has left its endpoint; else None, at once.

        Never where all are on one host, or the store is gone.
        """
        endpoints = self._endpoints
        if self._link is None or not endpoints:
            return None
        link, self._link = self._link, None
        hosts = list(dict.fromkeys(identity for identity, _ in endpoints))
        if len(hosts) == 1:
            link.close()
            return None
        link.members = [
            [number for number, (identity, _) in enumerate(endpoints) if identity == host]
            for host in hosts
        ]
        link.host, link.num_hosts = hosts.index(endpoints[self._number][0]), len(hosts)
        link.join(np.array([endpoints[numbers[0]][1] for numbers in link.members], np.int64))
        return link


def tell_hosts(run_path: Path, lost: str = "") -> None:
    """Say to all other hosts, for the ranks that share ``run_path``, why they end; empty: as asked.

    Nothing is said where there are no other hosts, or their ranks did not get as far.
    """
    with contextlib.suppress(
        ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError
    ):
        with os.fdopen(open_regular(RunFiles(run_path).link), "rb") as file:
            values = json.loads(file.read(_MAX_FILE))
        addresses = {int(host): (at, port) for host, (at, port) in values["addresses"].items()}
        (address, _), *_ = addresses.values()
        link = HostLink(address, values["host"], len(addresses) + 1)
        link.key, link.addresses = bytes.fromhex(values["key"]), addresses
        link.say_end(lost)
        link.close()
