"""The HTTP application: what users, dashboards and Prometheus ask for, and the pages for people."""

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ultraep_serve import __version__
from ultraep_serve.ring.reader import ALIVE_SECONDS
from ultraep_serve.sidecar.answers import Answers, prepare
from ultraep_serve.sidecar.health import Overview
from ultraep_serve.sidecar.logs import StateLog
from ultraep_serve.sidecar.metrics import BalanceCollector, DetailCollector
from ultraep_serve.sidecar.routes_balance import balance_routes, live_routes
from ultraep_serve.sidecar.routes_control import control_routes
from ultraep_serve.sidecar.routes_operate import Access, operate_routes
from ultraep_serve.sidecar.routes_record import record_routes
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot
from ultraep_serve.sidecar.statistics.summary import Heatmap, PolicyComparison
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.sidecar.switches import Switches
from ultraep_serve.sidecar.timeline import History

__all__ = ["AppOptions", "add_pages", "create_app"]

_MAX_THREADS = 8
_DESCRIPTION = """
What the ranks of one server did, and the switch for what they do next.

**Imbalance** is max/mean of assignments over ranks: for one MoE layer of one batch, the
assignments, (token, expert) pairs, of the busiest rank over the mean of all ranks; 1.0 is perfect.
*Before* is by routing alone, every token going to its expert's home rank; *after* is as computed.
**Prefill** batches have at least `min_batch_tokens` tokens over all ranks; smaller ones,
**decode**, keep the identity mapping, and their loads are not counted.

The last records of every rank are held in memory; figures over a window are made from them, those
over time are summed up as records arrive. What changes something wants the control token as
`Authorization: Bearer TOKEN`.
"""


@dataclass(frozen=True)
class AppOptions:
    """How closely to watch."""

    poll_seconds: float = 0.5  # between polls in the background
    heartbeat_limit_seconds: float = ALIVE_SECONDS  # a rank silent for longer is not alive
    max_records: int = 8192  # kept in memory of each rank
    reuse_seconds: float = 0.0  # how old a summary may be that is given to several clients
    event_seconds: float = 1.0  # between server-sent events


def create_app(
    run_dir: Path,
    token: str | None,
    allow_ideal: bool,
    *,
    settings: AppOptions | None = None,
    registry: CollectorRegistry | None = None,
) -> FastAPI:
    """The application over the rings in ``run_dir``, which need not exist yet.

    ``token`` opens the control endpoint (None or empty: closed to everyone); ``allow_ideal`` lets
    it switch to the policy that gives wrong answers. Metrics go to ``registry``, by default a new
    one.
    """
    watching = settings or AppOptions()
    store = RunStore(
        run_dir,
        heartbeat_limit_seconds=watching.heartbeat_limit_seconds,
        max_records=watching.max_records,
        reuse_seconds=watching.reuse_seconds / 5,
    )
    app = FastAPI(
        title="ultraep sidecar",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lambda _: _watching(store, watching.poll_seconds),
        docs_url=None,  # FastAPI's own page loads its scripts from elsewhere
        redoc_url=None,
    )
    app.state.stopping = False  # streams end when it is set
    answers = Answers(watching.reuse_seconds)
    registries = _registries(store, registry or CollectorRegistry())
    app.include_router(operate_routes(store, registries, run_dir, Access(token, allow_ideal)))
    app.include_router(live_routes(store, answers, watching.event_seconds))
    app.include_router(balance_routes(store, answers))
    app.include_router(control_routes(Switches(store, run_dir, allow_ideal), token))
    app.include_router(record_routes(run_dir, token))
    add_pages(app)
    app.add_exception_handler(NoRunError, _no_run)
    return app


@contextlib.asynccontextmanager
async def _watching(store: RunStore, poll_seconds: float) -> AsyncIterator[None]:
    """While the application serves: rings are polled, and changes of state logged."""
    prepare((BalanceSnapshot, Heatmap, History, Overview, PolicyComparison))
    # More threads would only wait for each other, and each takes memory of its own.
    to_thread.current_default_thread_limiter().total_tokens = _MAX_THREADS
    state_log = StateLog(store)

    def watch() -> None:
        store.poll()
        state_log.look()

    stop = _repeat(watch, poll_seconds)
    yield
    stop()


def _registries(
    store: RunStore, registry: CollectorRegistry
) -> tuple[CollectorRegistry, CollectorRegistry]:
    """``registry`` with the usual metrics, and one that also has those of many series."""
    detailed = CollectorRegistry()
    registry.register(BalanceCollector(store))
    detailed.register(BalanceCollector(store))
    detailed.register(DetailCollector(store))
    return registry, detailed


async def _no_run(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=503)


def _repeat(action: Callable[[], None], seconds: float) -> Callable[[], None]:
    """Do ``action`` in a thread every ``seconds``; returns what stops it."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(seconds):
            action()

    thread = threading.Thread(target=run, name="ultraep-poll", daemon=True)
    thread.start()

    def stop() -> None:
        stopping.set()
        thread.join()

    return stop


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
