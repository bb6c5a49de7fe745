"""How ranks of a domain hand each other their memory: its layout, and handles to import."""

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ultraep_serve.balance.cuda.driver import HandleKind, Shareable
from ultraep_serve.errors import FabricError, PeerTimeoutError
from ultraep_serve.telemetry.run_files import RunFiles

__all__ = ["GatherRendezvous", "Handshake", "Rendezvous", "SocketRendezvous"]

_HEADER = struct.Struct("!iqi")  # rank, bytes of the layout, descriptors
_DESCRIPTORS_PER_MESSAGE = 200  # the kernel takes at most 253
_RETRY_SECONDS = 0.01


@dataclass(frozen=True)
class Handshake:
    """What one rank says and gives to the others."""

    layout: bytes
    shareables: list[Shareable]  # descriptors received must be closed


class Rendezvous(Protocol):
    """Finds the other ranks of a domain."""

    kind: HandleKind

    def swap(self, layout: bytes, shareables: Sequence[Shareable]) -> list[Handshake]:
        """Return all handshakes by rank, this rank's without shareables, when all have come.

        Raises FabricError, PeerTimeoutError when a rank does not come.
        """


class SocketRendezvous:
    """Ranks of one host find each other in a directory and pass descriptors over Unix sockets."""

    kind = HandleKind.FILE_DESCRIPTOR

    def __init__(self, run_path: Path, rank: int, num_ranks: int, timeout_seconds: float) -> None:
        """``run_path`` is private to the user and this domain; ranks are counted within it.

        ``timeout_seconds`` is for all ranks to come, which includes loading their model.
        """
        self._run_path = run_path
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_seconds = timeout_seconds

    def swap(self, layout: bytes, shareables: Sequence[Shareable]) -> list[Handshake]:
        """Ranks connect to all lower ones in turn, then let the higher ones come."""
        descriptors = [item for item in shareables if isinstance(item, int)]
        assert len(descriptors) == len(shareables), "fabric handles need no socket"
        deadline = time.monotonic() + self._timeout_seconds
        found: dict[int, Handshake] = {self._rank: Handshake(layout, [])}
        with ExitStack() as undo, ExitStack() as connections:
            listener = connections.enter_context(self._listen())
            try:
                for peer in range(self._num_ranks - 1):  # as many as there are others
                    connection = (
                        self._connect(peer, deadline)
                        if peer < self._rank
                        else self._accept(listener, deadline)
                    )
                    connections.enter_context(connection)
                    self._send(connection, layout, descriptors)
                    rank, handshake = _receive(connection, undo)
                    found[rank] = handshake
            except TimeoutError:
                raise PeerTimeoutError(
                    f"{self._missing(found)} did not come within {self._timeout_seconds:g} s; "
                    "see that every rank of the group was started"
                ) from None
            except OSError as error:
                raise FabricError(
                    f"{self._missing(found)} did not complete the handshake: {error}; "
                    "a rank may have ended, see the logs of all ranks"
                ) from error
            if sorted(found) != list(range(self._num_ranks)):
                raise FabricError(f"ranks {sorted(found)} came, not 0 to {self._num_ranks - 1}")
            undo.pop_all()
        return [found[rank] for rank in range(self._num_ranks)]

    def _missing(self, found: dict[int, Handshake]) -> str:
        return f"rank {', '.join(str(r) for r in range(self._num_ranks) if r not in found)}"

    def _path_of(self, rank: int) -> Path:
        return RunFiles(self._run_path).socket(rank)

    def _listen(self) -> socket.socket:
        path = self._path_of(self._rank)
        listener = _Listener(path)
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            listener.listen(self._num_ranks)
        except OSError as error:
            listener.close()
            raise FabricError(f"cannot listen at {path}: {error}") from error
        return listener

    def _connect(self, peer: int, deadline: float) -> socket.socket:
        """Connect to a lower rank, once it listens."""
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _set_deadline(connection, deadline)
                connection.connect(str(self._path_of(peer)))
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                time.sleep(_RETRY_SECONDS)
            except BaseException:
                connection.close()
                raise

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        """Accept a connection from any higher rank."""
        _set_deadline(listener, deadline)
        connection = listener.accept()[0]
        connection.settimeout(listener.gettimeout())
        return connection

    def _send(self, peer: socket.socket, layout: bytes, descriptors: list[int]) -> None:
        peer.sendall(_HEADER.pack(self._rank, len(layout), len(descriptors)) + layout)
        for first in range(0, len(descriptors), _DESCRIPTORS_PER_MESSAGE):
            batch = descriptors[first : first + _DESCRIPTORS_PER_MESSAGE]
            socket.send_fds(peer, [b"."], batch)


class GatherRendezvous:
    """Ranks of several hosts use a channel of the engine's and hand over fabric handles."""

    kind = HandleKind.FABRIC

    def __init__(self, rank: int, all_gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """``all_gather`` returns every rank's bytes by rank and ends by itself if one is gone."""
        self._rank = rank
        self._all_gather = all_gather

    def swap(self, layout: bytes, shareables: Sequence[Shareable]) -> list[Handshake]:
        handles = [item for item in shareables if isinstance(item, bytes)]
        assert len(handles) == len(shareables), "file descriptors mean nothing to other hosts"
        mine = _HEADER.pack(self._rank, len(layout), len(handles)) + layout + b"".join(handles)
        found = []
        for rank, data in enumerate(self._all_gather(mine)):
            _, size, count = _HEADER.unpack_from(data)
            end = _HEADER.size + size
            length = (len(data) - end) // count if count else 0
            theirs: list[Shareable] = [
                data[end + index * length : end + (index + 1) * length] for index in range(count)
            ]
            own = rank == self._rank
            found.append(Handshake(data[_HEADER.size : end], [] if own else theirs))
        return found


class _Listener(socket.socket):
    """A listening Unix socket that takes its file with it."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path

    def close(self) -> None:
        super().close()
        self._path.unlink(missing_ok=True)


def _receive(peer: socket.socket, undo: ExitStack) -> tuple[int, Handshake]:
    """Receive a rank's handshake; ``undo`` closes its descriptors."""
    rank, size, count = _HEADER.unpack(_read(peer, _HEADER.size))
    layout = _read(peer, size)
    descriptors: list[Shareable] = []
    while len(descriptors) < count:
        wanted = min(count - len(descriptors), _DESCRIPTORS_PER_MESSAGE)
        data, batch, _, _ = socket.recv_fds(peer, 1, wanted)
        for descriptor in batch:
            undo.callback(os.close, descriptor)
            os.set_inheritable(descriptor, False)
        if not data or len(batch) != wanted:
            raise OSError(f"rank {rank} sent {len(batch)} of {wanted} descriptors (see ulimit -n)")
        descriptors += batch
    return rank, Handshake(layout, descriptors)


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
