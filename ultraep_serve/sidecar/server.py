"""Serving the application on a socket."""

import ipaddress
import logging
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ultraep_serve.errors import ConfigError
from ultraep_serve.sidecar.app import SidecarSettings, create_app

__all__ = ["is_loopback", "serve"]

_LOGGER = logging.getLogger(__name__)
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep theirs: who closes first must not be the server


def serve(
    run_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    token: str | None = None,
    allow_ideal: bool = False,
    settings: SidecarSettings | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; ``port`` 0 takes a free one, which is logged.

    Raises ConfigError when the address cannot be bound, or when the control endpoint would be
    reachable from other hosts without a token.
    """
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host = } is reachable from other hosts; set a control token, or bind 127.0.0.1"
        )
    listener = _listen(host, port)
    with listener:
        address = listener.getsockname()
        _say_started(host, address[1], run_dir, control_open=bool(token))
        settings = settings or SidecarSettings(reuse_seconds=0.5)
        app = create_app(run_dir, token, allow_ideal, settings=settings)
        config = uvicorn.Config(
            app,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=2,
        )
        _Server(config, app).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Tells the application at once when it is to stop, so that streams end by themselves."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.stopping = True
        super().handle_exit(sig, frame)


def _say_started(host: str, port: int, run_dir: Path, *, control_open: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    fields = {"event": "start", "url": url, "run_dir": str(run_dir), "control_open": control_open}
    _LOGGER.info(
        "sidecar on %s over %s, control %s",
        url,
        run_dir,
        "with a token" if control_open else "closed",
        extra={"fields": fields},
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: nobody knows what it resolves to


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:  # getaddrinfo would silently wrap it around
        raise ConfigError(f"--port {port} is not legal; legal: 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"cannot serve on {host}:{port}: {error}; choose another with --host or --port"
        ) from error
