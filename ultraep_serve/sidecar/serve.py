"""The sidecar's process: command line, control token, log, socket, memory."""

import argparse
import contextlib
import ctypes
import ipaddress
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvicorn

from ultraep_serve.config import SidecarSettings, add_file_flag, given_settings
from ultraep_serve.errors import ConfigError
from ultraep_serve.sidecar.access import server_settings
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.system.environment import control_token_from_environment
from ultraep_serve.system.files import SharedFile, read_token
from ultraep_serve.system.machine import address_of, is_here, why_not_listen
from ultraep_serve.system.topology import is_process_alive
from ultraep_serve.telemetry.run_directory import find_run, remove_when_left
from ultraep_serve.telemetry.run_files import RunFiles

_NICE = 10
_LOGGER = logging.getLogger(__name__)
_LEAVE_SECONDS = 600.0  # for other ranks to be gone after the parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    run_dir = "the server's run directory (default: that of the only server on this machine)"
    parser.add_argument("--run-dir", metavar="DIR", help=run_dir)
    parent = "end with this process, and remove what it left"
    parser.add_argument("--parent", type=int, metavar="PID", help=parent)
    add_file_flag(parser)
    SidecarSettings.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped.

    Raises ConfigError when the address cannot be used, NoServerError without a server.
    """
    run_dir = Path(arguments.run_dir) if arguments.run_dir else find_run()
    _, settings = given_settings(arguments, "")
    _limit_heaps()
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    parent = arguments.parent
    if parent is None:
        serve(run_dir, settings, control_token(run_dir))
        return 0
    _stand_apart()
    _when_ended(parent, logging.disable)  # the engine's last line is the reason of its end
    try:
        serve(run_dir, settings, control_token(run_dir), parent)
    except ConfigError:
        if is_process_alive(parent):  # else what is wrong is that its run is gone
            raise
    remove_when_left(run_dir, _LEAVE_SECONDS)
    return 0


def _stand_apart() -> None:
    """Take no signals of the engine's terminal, and any core: engines pin ranks to a few.

    The session stays the engine's: Linux may share cores out by session, and a process of another
    one would wait while ranks compute all the time.
    """
    os.setpgrp()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it ends after the engine, and tidies up
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def serve(
    run_dir: Path, settings: SidecarSettings, token: str | None = None, parent: int | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, or until the process ``parent`` is gone.

    Port 0 is a free one, which is logged.

    Raises ConfigError when the address cannot be bound, or when the control endpoint would be
    reachable from other hosts without a token.
    """
    host, port = settings.host, settings.port_beside()
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{host = } is reachable from other hosts; set a control token, or bind 127.0.0.1"
        )
    with _listen(host, port) as listener:
        url = f"http://{address_of(host, listener.getsockname()[1])}"
        control = "with a token" if token else "closed"
        _LOGGER.info("sidecar on %s over %s, control %s", url, run_dir, control)
        names = (host, *settings.allowed_hosts.split(","))
        limits = server_settings(create_app(run_dir, token, names))
        config = uvicorn.Config(**limits, log_level="warning", timeout_graceful_shutdown=2)
        _give_way()
        server = uvicorn.Server(config)
        if parent is not None:
            _when_ended(parent, partial(setattr, server, "should_exit", True))
        server.run(sockets=[listener])


def _give_way() -> None:
    """Let the engine go first from here on, and yet answer probes while ranks keep all cores busy.

    At nice 10 a process beside one that computes gets a tenth of the core; at 19, a seventieth,
    answers of a busy sidecar came later than probes wait.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


def _when_ended(process: int, action: Callable[[], object]) -> None:
    """Have a thread do ``action`` when ``process`` has ended."""

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(process)], [], [])
        action()

    threading.Thread(target=wait, daemon=True).start()


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to any address


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        reason, wrong = why_not_listen(host, port) or error, "port" if is_here(host) else "host"
        raise ConfigError(
            f"cannot serve on {address_of(host, port)}: {reason}; choose another --{wrong}"
        ) from error


def control_token(run_dir: Path) -> str:
    """The operator's token, else the one in ``run_dir/token``, else a new one written there.

    Raises ConfigError when the file cannot be written or cannot be trusted.
    """
    chosen = control_token_from_environment()
    if chosen:
        return chosen
    path, token = RunFiles(run_dir).token, secrets.token_urlsafe(32)
    try:
        SharedFile.create(path, token.encode(), len(token), replace=False).close()
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return token


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGE_BYTES = 2 << 20
_KEPT_BYTES = 16 << 20  # free at the end of the heap, so that it need not grow again at once


def _limit_heaps() -> None:
    """Map large arrays separately and share one heap among threads, so that memory is returned.

    By default glibc stops mapping large arrays once one was freed; they then come from one heap per
    thread, and heaps keep their maximum size. Other C libraries are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
