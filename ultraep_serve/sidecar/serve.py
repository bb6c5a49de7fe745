"""The sidecar's command line, and serving the application on a socket."""

import argparse
import contextlib
import ctypes
import ipaddress
import logging
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ultraep_serve.config import SidecarSettings, add_flags, values_of_flags
from ultraep_serve.errors import ConfigError
from ultraep_serve.sidecar.app import AppOptions, create_app
from ultraep_serve.sidecar.logs import set_up_logging
from ultraep_serve.sidecar.tokens import control_token

__all__ = ["add_arguments", "give_memory_back", "is_loopback", "run", "serve"]

_LOGGER = logging.getLogger(__name__)
_DEFAULT_PORT = 8001
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep theirs: who closes first must not be the server


def serve(
    run_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = _DEFAULT_PORT,
    token: str | None = None,
    allow_ideal: bool = False,
    settings: AppOptions | None = None,
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
        settings = settings or AppOptions(reuse_seconds=0.5)
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
        raise ConfigError(f"--port {port} must be 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"cannot serve on {host}:{port}: {error}; choose another with --host or --port"
        ) from error


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGE_BYTES = 2 << 20
_KEPT_BYTES = 16 << 20  # free at the heap's end, so that it need not grow again at once


def give_memory_back() -> None:
    """Map large arrays one by one, and share one heap among threads; only glibc is told.

    By default the first large array freed makes all later ones come from the heap of whichever
    thread asks, and those heaps keep the most they ever had.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` takes."""
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    add_flags(parser, SidecarSettings)
    parser.add_argument(
        "--allow-ideal", action="store_true", help="permit the policy that gives wrong answers"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped. Raises ConfigError when the address cannot be used."""
    settings = SidecarSettings(**values_of_flags(arguments, SidecarSettings))
    give_memory_back()
    set_up_logging(settings.log_format)
    serve(
        arguments.run_dir,
        host=settings.host,
        port=_DEFAULT_PORT if settings.port is None else settings.port,
        token=control_token(arguments.run_dir),
        allow_ideal=arguments.allow_ideal,
    )
    return 0
