"""Who may change something, decided before anything but the head of a request is read; by which
names the sidecar may be called; and what is answered to bodies that are too large or wrong.
"""

import hmac
import ipaddress
import json
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BEARER", "REFUSALS", "KnownNames", "bearers_only", "wrong_values"]

_MAX_BODY_BYTES = 64 << 10
_SCHEME = HTTPBearer(auto_error=False, description="the sidecar's control token")
BEARER = Depends(_SCHEME)  # names the scheme in the documents; ``bearers_only`` checks the token
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "the token is missing or wrong"},
    403: {"description": "the sidecar has no token, or the policy needs --allow-ideal"},
    413: {"description": f"the body has more than {_MAX_BODY_BYTES} bytes"},
}


def bearers_only(token: str | None) -> type[APIRoute]:
    """Routes for bearers of ``token``, or for nobody where there is none, with small bodies.

    A dependency would be too late: FastAPI reads and parses the body before them.
    """

    class BearersOnly(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_authorised(request: Request) -> Response:
                _authorise(await _SCHEME(request), token)
                return await handle(await _small(request) if self.body_field else request)

            return handle_authorised

    return BearersOnly


def _authorise(given: HTTPAuthorizationCredentials | None, token: str | None) -> None:
    if not token:
        raise HTTPException(403, "control is closed: the sidecar was started without a token")
    offered = given.credentials.strip() if given else ""
    if not hmac.compare_digest(offered.encode(), token.encode()):
        raise HTTPException(
            401,
            "send 'Authorization: Bearer TOKEN' with the sidecar's control token",
            {"WWW-Authenticate": "Bearer"},
        )


async def _small(request: Request) -> Request:
    """``request`` with its body in memory. Raises HTTPException as soon as that is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"a body may have {_MAX_BODY_BYTES} bytes")

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return Request(request.scope, receive)


class KnownNames:
    """Refuses requests that call the sidecar by a name that may be anybody's.

    A page of another site whose name is made to resolve to this address (DNS rebinding) could else
    read everything here through a visitor's browser. Addresses are no names, and names without a
    dot are nobody's on the internet.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """``names`` that are allowed beside this machine's own."""
        self._app = app
        self._names = {name.lower().rstrip(".") for name in (*names, socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if self._is_known(host):
            await self._app(scope, receive, send)
            return
        detail = f"{host[:100]!r} is not known here; set the sidecar's allowed_hosts"
        await JSONResponse({"detail": detail}, 421)(scope, receive, send)

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


async def wrong_values(_: Request, error: Exception) -> Response:
    """What is wrong where; not the value itself, which need not have a form in JSON or UTF-8."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: one[key] for key in ("type", "loc", "msg")} for one in error.errors()]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")
