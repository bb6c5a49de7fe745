"""The pages for people: files of this package, nothing from elsewhere."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["add_pages"]

_FILES = Path(__file__).with_name("static")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def add_pages(app: FastAPI) -> None:
    """Serve the dashboard at ``/`` and the interface's documentation at ``/docs``."""
    app.add_middleware(_StrictHeaders)
    app.mount("/static", StaticFiles(directory=_FILES), name="static")
    app.add_api_route("/", lambda: FileResponse(_FILES / "index.html"), include_in_schema=False)
    app.add_api_route("/docs", lambda: FileResponse(_FILES / "docs.html"), include_in_schema=False)


class _StrictHeaders:
    """Browsers run and load only what comes from here, whatever an answer may contain."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await self._app(scope, receive, send_strict if scope["type"] == "http" else send)
