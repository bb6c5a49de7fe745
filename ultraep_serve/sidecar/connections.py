"""HTTP connections that nobody can hold open to keep others out.

uvicorn by itself limits neither their number nor how long the head of a request may take.
"""

import asyncio
import contextlib
from functools import partial
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ultraep_serve.sidecar.budget import Turns

__all__ = ["server_settings"]

MAX_CONNECTIONS = 512
HEAD_SECONDS = 10.0  # for a request's head to be complete, from when the connection is made
_HEAD_BYTES = 16 << 10
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep theirs, so that the client closes first
# Browsers load and run only files of this server, whatever an answer contains.
_HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]


def server_settings(app: ASGIApp, share: float | None = None) -> dict[str, Any]:
    """Arguments of ``uvicorn.Config`` that serve ``app`` within the limits.

    Reading requests takes ``share`` of a core; None: without limit.
    """
    connections: _Connections = {}
    turns = None if share is None else Turns(share)

    async def take_turn(scope: Scope, receive: Receive, send: Send) -> None:
        if turns is not None and scope["type"] == "http":
            await turns.wait(scope["path"])
        await app(scope, receive, send)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        connection = connections.get(scope.get("client") or ())
        if connection is None:
            await take_turn(scope, receive, send)
            return
        connection.begin()
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the server stops
                await take_turn(scope, receive, send)
        finally:
            connection.end()

    return {
        "app": answer,
        "http": partial(_Connection, connections),
        "h11_max_incomplete_event_size": _HEAD_BYTES,
        "ws": "none",
        "headers": _HEADERS,
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "proxy_headers": False,  # by their address connections are known
    }


_Connections = dict[tuple[Any, ...], "_Connection"]  # those of a server, by address


class _Connection:
    """One connection, whose bytes uvicorn's protocol reads.

    One beyond the limit takes the place of the quietest. Those that wait for a request go first, so
    that whoever asks, as probes do, gets an answer.
    """

    def __init__(self, connections: _Connections, **settings: Any) -> None:
        """``settings`` are uvicorn's."""
        self._http: asyncio.Protocol = H11Protocol(**settings)
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._requests = 0  # that are being answered
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make room for it."""
        self._transport = cast(asyncio.Transport, transport)
        self._address = (transport.get_extra_info("peername") or (self,))[:2]
        if len(self._connections) >= MAX_CONNECTIONS:
            others = self._connections.values()
            quietest = min(others, key=lambda other: (bool(other._requests), other._heard_at))
            quietest._transport.abort()
            del self._connections[quietest._address]
        self._connections[self._address] = self
        self._time_head()
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """The head of a request, a part of one, or a body."""
        self._heard_at = self._loop.time()
        self._time_head()
        self._http.data_received(data)

    def begin(self) -> None:
        """A request has its head."""
        self._requests += 1
        self._stop_timer()

    def end(self) -> None:
        """A request is answered."""
        self._requests -= 1

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_timer()
        if self._connections.get(self._address) is self:
            del self._connections[self._address]
        self._http.connection_lost(exc)

    def __getattr__(self, name: str) -> Any:
        """The rest of an ``asyncio.Protocol`` is uvicorn's."""
        return getattr(self._http, name)

    def _time_head(self) -> None:
        """Close it where the head of a request does not end in time."""
        if not self._requests and self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_SECONDS, self._transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
