"""How the ranks of a domain reach each other's memory: they meet, and map what each hands out.

Every rank has signals (what its fabric exchanges by) and a slot pool. Ranks of one host pass
descriptors over Unix sockets in the run directory; between hosts a channel of the engine's takes
fabric handles.
"""

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ultraep_serve.balance.memory import Allocation, HandleKind, MappedMemory, Shareable, create
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.errors import FabricError, PeerTimeoutError, UltraEPError
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.run_files import RunFiles

_HEADER = struct.Struct("!iqi")  # rank, bytes of the layout, descriptors
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_DESCRIPTORS_PER_MESSAGE = 200  # the kernel takes at most 253
_RETRY_SECONDS = 0.01
_LOOK_SECONDS = 0.5  # between two looks at whether this rank's socket is still there
_HANDLE_BYTES = 64  # of a fabric handle
_OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class Handshake:
    """What one rank says and gives to the others."""

    layout: bytes
    shareables: list[Shareable]  # descriptors received must be closed
    process: int = 0  # its number here; 0 where it cannot be seen


@dataclass(frozen=True)
class Domain:
    """Where the memory of a domain's ranks is mapped here, by rank of the domain."""

    signals: list[int]  # addresses
    pools: list[int]
    processes: list[int]  # 0 where it cannot be seen


def map_domain(
    pool: SlotPool,
    rendezvous: "Rendezvous",
    location: Location,
    signal_bytes: int,
    limits: list[int],
    undo: ExitStack,
) -> Domain:
    """Map the signals and slots of all ranks of this one's domain until ``undo`` is closed.

    All layers have been adopted by ``pool``. Signals are 0 before any rank sees them. ``limits``
    must be the same on every rank. Raises what the rendezvous and the pool's driver raise,
    FabricError when a rank differs, UnsupportedError where one's memory is out of reach.
    """
    driver = pool.driver
    if rendezvous.kind is not driver.kind:
        raise FabricError(
            f"memory is shared by {driver.kind.value}, the ranks swap {rendezvous.kind.value}; "
            "they must agree"
        )
    memory = [create(driver, signal_bytes, undo), *pool.regions]
    signals = _mapped(pool, memory[:1], undo)
    driver.tensor(signals, memory[0].size).zero_()
    driver.synchronize()  # before anybody can raise a flag in it
    layout = [[each.size for each in memory], pool.num_slots, limits]  # alike on every rank
    is_seen = rendezvous.kind is HandleKind.FILE_DESCRIPTOR
    own = signals, _mapped(pool, pool.regions, undo), os.getpid() if is_seen else 0
    found = {location.rank: own}
    with ExitStack() as descriptors:
        shareables = []
        for allocation in memory:
            shareables.append(driver.share(allocation.handle))
            _close_later(shareables[-1], descriptors)
        others = rendezvous.swap(json.dumps([layout, driver.uuid]).encode(), shareables)
        problem: UltraEPError | None = None
        for rank, handshake in descriptors.enter_context(closing(others)):
            # one after the other: all of them together may be more than a process may open
            try:
                found[rank] = _map_theirs(pool, layout, rank, handshake, undo)
            except UltraEPError as error:
                problem = error  # others still wait for this rank to come
        if problem is not None:
            raise problem
    by_rank = (found[rank] for rank in location.domain)
    return Domain(*map(list, zip(*by_rank, strict=True)))


def _map_theirs(
    pool: SlotPool, layout: list[Any], rank: int, handshake: Handshake, undo: ExitStack
) -> tuple[int, int, int]:
    """Addresses of another ``rank``'s signals and pool, and its process; closes descriptors."""
    driver = pool.driver
    with ExitStack() as once_mapped:
        for shareable in handshake.shareables:
            _close_later(shareable, once_mapped)
        theirs, device = json.loads(handshake.layout)
        if theirs != layout:
            raise FabricError(f"rank {rank} laid out its slots unlike this one")
        driver.require_peer(device, rank)
        received = []
        for size, shareable in zip(layout[0], handshake.shareables, strict=True):
            received.append(Allocation(driver.receive(shareable), size))
            once_mapped.callback(driver.release, received[-1].handle)
        signals, slots = (_mapped(pool, part, undo) for part in (received[:1], received[1:]))
        return signals, slots, handshake.process


def of_group(location: Location, addresses: Sequence[int]) -> list[int]:
    """The domain's ``addresses`` by rank of the group, as plans are; no plan needs others': 0."""
    table = [0] * location.num_ranks
    table[location.domain.start : location.domain.stop] = addresses
    return table


def _mapped(pool: SlotPool, allocations: Sequence[Allocation], undo: ExitStack) -> int:
    mapped = MappedMemory(pool.driver, allocations)
    undo.callback(mapped.close)
    return mapped.address


def _close_later(shareable: Shareable, descriptors: ExitStack) -> None:
    if isinstance(shareable, int):
        descriptors.callback(os.close, shareable)


class SocketRendezvous:
    """Ranks of one host find each other in a directory and pass descriptors over Unix sockets."""

    kind = HandleKind.FILE_DESCRIPTOR

    def __init__(self, run_path: Path, rank: int, ranks: range, timeout_seconds: float) -> None:
        """``run_path`` is private to the user; ``ranks`` are those of the domain.

        ``timeout_seconds`` is for all ranks to come, which includes loading their model.
        """
        self._run_path = run_path
        self._rank = rank
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds

    def swap(
        self, layout: bytes, shareables: Sequence[Shareable]
    ) -> Generator[tuple[int, Handshake]]:
        """Yield the rank and handshake of each other rank of the domain as it comes.

        Ranks connect to all lower ones in turn, then let the higher ones come. Raises FabricError,
        PeerTimeoutError when a rank does not come.
        """
        descriptors = [item for item in shareables if isinstance(item, int)]
        assert len(descriptors) == len(shareables), "fabric handles need no socket"
        deadline = time.monotonic() + self._timeout_seconds
        found = {self._rank}
        with ExitStack() as connections:
            listener = self._listen(connections)
            try:
                for peer in self._ranks[:-1]:  # as many as there are others
                    connection = (
                        self._connect(peer, deadline)
                        if peer < self._rank
                        else self._accept(listener, deadline)
                    )
                    connections.enter_context(connection)
                    self._send(connection, layout, descriptors)
                    rank, handshake = _receive(connection)
                    found.add(rank)
                    yield rank, handshake
            except TimeoutError:
                raise PeerTimeoutError(
                    f"rank {self._rank} waited for {self._missing(found)}, which did not come "
                    f"within {self._timeout_seconds:g} s; look for its error in the engine's log"
                ) from None
            except OSError as error:
                raise FabricError(
                    f"{self._missing(found)} did not complete the handshake: {error}; "
                    "a rank may have ended, see the logs of all ranks"
                ) from error
            if sorted(found) != list(self._ranks):
                raise FabricError(f"ranks {sorted(found)} came, not {list(self._ranks)}")

    def _missing(self, found: set[int]) -> str:
        return f"rank {', '.join(str(rank) for rank in self._ranks if rank not in found)}"

    def _path_of(self, rank: int) -> Path:
        return RunFiles(self._run_path).socket(rank)

    def _listen(self, connections: ExitStack) -> socket.socket:
        """Listen until ``connections`` are closed."""
        path = self._path_of(self._rank)
        listener = connections.enter_context(_new_socket())
        connections.callback(path.unlink, missing_ok=True)
        try:
            path.unlink(missing_ok=True)
            with _address_of(path) as address:
                listener.bind(address)
            listener.listen(len(self._ranks))
        except OSError as error:
            raise FabricError(f"cannot listen at {path}: {error}") from error
        return listener

    def _connect(self, peer: int, deadline: float) -> socket.socket:
        """Connect to a lower rank, once it listens."""
        while True:
            connection = _new_socket()
            try:
                _set_deadline(connection, deadline)
                with _address_of(self._path_of(peer)) as address:
                    connection.connect(address)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                self._require_socket()
                time.sleep(_RETRY_SECONDS)
            except BaseException:
                connection.close()
                raise

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        """Accept a connection from any higher rank."""
        while True:
            _set_deadline(listener, min(deadline, time.monotonic() + _LOOK_SECONDS))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                self._require_socket()
                continue
            _set_deadline(connection, deadline)
            return connection

    def _require_socket(self) -> None:
        if not self._path_of(self._rank).exists():
            raise FabricError(
                f"somebody deletes the files in {self._run_path} while ranks meet there; start the "
                "engine again"
            )

    def _send(self, peer: socket.socket, layout: bytes, descriptors: list[int]) -> None:
        peer.sendall(_HEADER.pack(self._rank, len(layout), len(descriptors)) + layout)
        for first in range(0, len(descriptors), _DESCRIPTORS_PER_MESSAGE):
            batch = descriptors[first : first + _DESCRIPTORS_PER_MESSAGE]
            socket.send_fds(peer, [b"."], batch)


class GatherRendezvous:
    """Ranks of several hosts use a channel of the engine's and hand over fabric handles."""

    kind = HandleKind.FABRIC

    def __init__(
        self, rank: int, ranks: range, all_gather: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        """``all_gather`` returns the bytes of all ``ranks``; it ends by itself if one is gone."""
        self._rank, self._ranks = rank, ranks
        self._all_gather = all_gather

    def swap(
        self, layout: bytes, shareables: Sequence[Shareable]
    ) -> Generator[tuple[int, Handshake]]:
        """As ``SocketRendezvous.swap``."""
        handles = [item for item in shareables if isinstance(item, bytes)]
        assert len(handles) == len(shareables), "file descriptors mean nothing to other hosts"
        layouts, joined = self._all_gather(layout), self._all_gather(b"".join(handles))
        for rank, layout, own in zip(self._ranks, layouts, joined, strict=True):
            if rank != self._rank:
                starts = range(0, len(own), _HANDLE_BYTES)
                yield rank, Handshake(layout, [own[at : at + _HANDLE_BYTES] for at in starts])


Rendezvous: TypeAlias = SocketRendezvous | GatherRendezvous


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


@contextmanager
def _address_of(path: Path) -> Iterator[str]:
    """A socket's address, which has room for 107 bytes, for a ``path`` of any length."""
    if not _OPEN_FILES.exists():
        raise OSError("/proc is not mounted here, which ranks meet by; mount it")
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"{_OPEN_FILES}/{folder}/{path.name}"
    finally:
        os.close(folder)


def _receive(peer: socket.socket) -> tuple[int, Handshake]:
    """Receive a rank's handshake, or nothing of it."""
    rank, size, count = _HEADER.unpack(_read(peer, _HEADER.size))
    layout = _read(peer, size)
    descriptors: list[Shareable] = []
    with ExitStack() as undo:
        while len(descriptors) < count:
            wanted = min(count - len(descriptors), _DESCRIPTORS_PER_MESSAGE)
            data, batch, _, _ = socket.recv_fds(peer, 1, wanted)
            for descriptor in batch:
                undo.callback(os.close, descriptor)
                os.set_inheritable(descriptor, False)
            if not data or len(batch) != wanted:
                came = f"{len(batch)} of {wanted} descriptors"
                raise OSError(f"rank {rank} sent {came} (see ulimit -n)")
            descriptors += batch
        undo.pop_all()
    size = _CREDENTIALS.size
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return rank, Handshake(layout, descriptors, _CREDENTIALS.unpack(credentials)[0])


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
