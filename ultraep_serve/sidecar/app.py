"""The HTTP application: what users, dashboards and Prometheus ask for."""

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry

from ultraep_serve import __version__
from ultraep_serve.sidecar.metrics import BalanceCollector
from ultraep_serve.sidecar.metrics_detail import DetailCollector
from ultraep_serve.sidecar.routes_balance import balance_routes
from ultraep_serve.sidecar.routes_control import control_routes
from ultraep_serve.sidecar.routes_operate import operate_routes
from ultraep_serve.sidecar.routes_record import record_routes
from ultraep_serve.sidecar.store import NoRunError, RunStore

__all__ = ["SidecarSettings", "create_app"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ultraep</title></head><body>
<h1>ultraep</h1>
<ul>
<li><a href="v1/balance">balance</a></li>
<li><a href="v1/balance/batches">recent batches</a></li>
<li><a href="v1/config">configuration</a></li>
<li><a href="metrics">metrics</a></li>
<li><a href="readyz">readiness</a></li>
<li><a href="docs">all endpoints</a></li>
</ul></body></html>
"""


@dataclass(frozen=True)
class SidecarSettings:
    """How closely to watch."""

    poll_seconds: float = 0.5  # between polls in the background
    heartbeat_limit_seconds: float = 5.0  # a rank silent for longer is not alive
    max_records: int = 16384  # kept in memory of each rank


def create_app(
    run_dir: Path,
    token: str | None,
    allow_ideal: bool,
    *,
    settings: SidecarSettings | None = None,
    registry: CollectorRegistry | None = None,
) -> FastAPI:
    """The application over the rings in ``run_dir``, which need not exist yet.

    ``token`` opens the control endpoint (None or empty: closed to everyone); ``allow_ideal`` lets
    it switch to the policy that gives wrong answers. Metrics go to ``registry``, by default a new
    one.
    """
    settings = settings or SidecarSettings()
    registry = registry or CollectorRegistry()
    store = RunStore(
        run_dir,
        heartbeat_limit_seconds=settings.heartbeat_limit_seconds,
        max_records=settings.max_records,
    )
    detailed = CollectorRegistry()
    registry.register(BalanceCollector(store))
    detailed.register(BalanceCollector(store))
    detailed.register(DetailCollector(store))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stop = _start_polling(store.poll, settings.poll_seconds)
        yield
        stop()

    app = FastAPI(title="ultraep sidecar", version=__version__, lifespan=lifespan)
    app.include_router(operate_routes(store, registry, detailed, run_dir))
    app.include_router(balance_routes(store))
    app.include_router(control_routes(store, run_dir, token, allow_ideal))
    app.include_router(record_routes(run_dir, token))
    app.add_api_route("/", lambda: HTMLResponse(_PAGE), include_in_schema=False)
    app.add_exception_handler(NoRunError, _no_run)
    return app


async def _no_run(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=503)


def _start_polling(poll: Callable[[], None], seconds: float) -> Callable[[], None]:
    """Poll in a thread every ``seconds``; returns what stops it."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(seconds):
            poll()

    thread = threading.Thread(target=run, name="ultraep-poll", daemon=True)
    thread.start()

    def stop() -> None:
        stopping.set()
        thread.join()

    return stop
