"""What protects the sidecar's port: names, the control token, and limits on what clients send."""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY_BYTES = 64 << 10
_GUARDED = "/v1/control"
_HEAD_BYTES = 16 << 10
_HEAD_SECONDS = 10.0  # longer than most clients keep a connection that they do not use
_MAX_WAITING = 256  # connections that wait for a head
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


class Guard:
    """ASGI middleware that refuses requests by their heads, before a body is read.

    A page of another site whose name is made to resolve to this address (DNS rebinding) could read
    everything here through a visitor's browser; so the name in ``Host`` must be known. Addresses
    are no names, and names without a dot are nobody's on the internet.
    """

    def __init__(self, app: ASGIApp, token: str | None, names: Iterable[str]) -> None:
        """``token`` opens control (None or empty: nothing does); ``names`` may be in ``Host``."""
        self._app, self._token = app, token
        self._names = {name.lower().rstrip(".") for name in (*names, socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp | None = None
        if scope["type"] == "http":  # also the server's start and end come here
            answer = self._refusal(scope["path"], Headers(scope=scope))
            if scope["method"] == "HEAD":  # answered as GET; the server leaves out the body
                scope = {**scope, "method": "GET"}
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        host = headers.get("host", "")
        if not self._is_known(host):
            return _refused(
                421, f"{host[:100]!r} is not known here; set the sidecar's allowed_hosts"
            )
        if not path.startswith(_GUARDED):
            return None
        if not self._token:
            return _refused(403, "control is closed: the sidecar was started without a token")
        scheme, _, offered = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(offered.strip().encode(), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            wanted = "send 'Authorization: Bearer TOKEN' with the sidecar's control token"
            return _refused(401, wanted, {"WWW-Authenticate": "Bearer"})
        if "transfer-encoding" in headers:
            return _refused(411, "say how long the body is, in Content-Length")
        if int(headers.get("content-length", 0)) > MAX_BODY_BYTES:
            return _refused(413, f"a body may have {MAX_BODY_BYTES} bytes")
        return None

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.lower().rstrip(".")
        if ("." not in name and ":" not in name) or name in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.endswith(".localhost")
        return True


def _refused(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)


class TimedHeads(H11Protocol):
    """uvicorn's HTTP/1.1, with a limit to the time in which the head of a request must come.

    uvicorn itself waits without one, so connections that send nothing would take all descriptors
    and keep probes out. The time begins when a connection is made, and after each answer. Of more
    than ``_MAX_WAITING`` connections that wait, the one that waits longest is closed.
    """

    _limit: asyncio.TimerHandle | None = None  # None while a request is answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection, and begin to wait for its first head."""
        super().connection_made(transport)
        self._await_head()
        connections: set[TimedHeads] = self.connections  # type: ignore[assignment]
        waiting = {one: one._limit.when() for one in connections if one._limit is not None}
        if len(waiting) > _MAX_WAITING:
            min(waiting, key=waiting.__getitem__)._close()

    def data_received(self, data: bytes) -> None:
        """Read a part of a head or of a body."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next head, unless the client has sent it already."""
        super().on_response_complete()
        if not self._is_answering():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._stop_waiting()
        self._limit = self.loop.call_later(_HEAD_SECONDS, self._close)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close(self) -> None:
        self._stop_waiting()
        self.transport.abort()  # close() would wait for a client that reads nothing


def server_settings(app: ASGIApp) -> dict[str, Any]:
    """Arguments of ``uvicorn.Config`` that serve ``app`` within the limits."""
    return {
        "app": app,
        "http": TimedHeads,
        "h11_max_incomplete_event_size": _HEAD_BYTES,
        "timeout_keep_alive": int(_HEAD_SECONDS),
        "ws": "none",
        "headers": _HEADERS,
        "proxy_headers": False,
    }
