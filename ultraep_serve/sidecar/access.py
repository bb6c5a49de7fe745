"""Who may change something, decided before anything but the head of a request is read; and what is
answered to bodies that are too large or wrong.
"""

import hmac
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import Message

__all__ = ["BEARER", "REFUSALS", "bearers_only", "wrong_values"]

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


async def wrong_values(_: Request, error: Exception) -> Response:
    """What is wrong where; not the value itself, which need not have a form in JSON or UTF-8."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: one[key] for key in ("type", "loc", "msg")} for one in error.errors()]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")
