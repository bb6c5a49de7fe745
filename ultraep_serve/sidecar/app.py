"""The HTTP application: its endpoints, its page, and the thread that polls the rings."""

import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from ultraep_serve import __version__
from ultraep_serve.errors import ControlError
from ultraep_serve.sidecar.access import Guard
from ultraep_serve.sidecar.routes import balance_routes, control_routes, state_routes
from ultraep_serve.sidecar.store import NoRunError, Run, RunStore
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

_LOGGER = logging.getLogger("ultraep_serve.sidecar")
_POLL_SECONDS = 0.5
_MAX_THREADS = 8
_MAX_REASONS = 4  # in a line of the log
_FILES = Path(__file__).with_name("static")  # the page
_DESCRIPTION = """
How the ranks of one server balance their load, and control over the policy in force.

**Imbalance** is max/mean of assignments over ranks: for one MoE layer of one batch, the
assignments, (token, expert) pairs, of the busiest rank over the mean of all ranks; 1.0 is perfect.
*Before* is by routing alone, every token going to its expert's home rank; *after* is as computed.
**Prefill** batches have at least `min_batch_tokens` tokens over all ranks; smaller ones,
**decode**, keep the identity mapping, and their loads are not counted.

The **window** is the last 15 minutes in which there were prefill batches, or less where that would
take too much memory. Requests that change something need the control token as
`Authorization: Bearer TOKEN`.
"""


def create_app(run_dir: Path, token: str | None, allowed_hosts: tuple[str, ...] = ()) -> FastAPI:
    """The application over the rings in ``run_dir``, which need not exist yet.

    ``token`` gives access to control (None or empty: nobody has it); ``allowed_hosts`` are names by
    which it may be called, beside its own.
    """
    store = RunStore(run_dir)
    app = FastAPI(
        title="ultraep sidecar",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lambda _: _polling(store),
        docs_url=None,  # FastAPI's own page loads its scripts from other hosts
        redoc_url=None,
    )
    for router in (
        state_routes(store, RunFiles(run_dir), control_open=bool(token)),
        balance_routes(store),
        control_routes(store, run_dir),
    ):
        app.include_router(router)
    app.add_middleware(Guard, token=token, names=allowed_hosts)
    app.mount("/static", StaticFiles(directory=_FILES), name="static")
    app.add_api_route("/", lambda: FileResponse(_FILES / "index.html"), include_in_schema=False)
    app.add_exception_handler(NoRunError, _no_run)
    app.add_exception_handler(ControlError, _conflict)
    app.add_exception_handler(RequestValidationError, _wrong_values)
    return app


@contextlib.asynccontextmanager
async def _polling(store: RunStore) -> AsyncIterator[None]:
    """Poll the rings and log changes of state while the application serves."""
    # More threads would only wait for each other, and each takes memory.
    to_thread.current_default_thread_limiter().total_tokens = _MAX_THREADS
    state_log, stopping = StateLog(), threading.Event()

    def run() -> None:
        known = ""
        while not stopping.wait(_POLL_SECONDS):
            try:
                state_log.update(store.poll())
            except Exception as error:  # without this thread records would be missed for good
                if str(error) != known:
                    known = str(error)
                    _LOGGER.exception("the rings could not be read this time: %s", error)

    thread = threading.Thread(target=run, name="ultraep-poll", daemon=True)
    thread.start()
    yield
    stopping.set()
    thread.join()


async def _no_run(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, NoRunError)
    return JSONResponse(error.answer.model_dump(), 503)


async def _conflict(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 409)


async def _wrong_values(_: Request, error: Exception) -> Response:
    """What is wrong where; not the value itself, which need not have a form in JSON or UTF-8."""
    assert isinstance(error, RequestValidationError)
    detail = [{key: one[key] for key in ("type", "loc", "msg")} for one in error.errors()]
    return JSONResponse({"detail": detail}, 422)


class StateLog:
    """Logs one line per change of readiness or policy, nothing per batch."""

    def __init__(self) -> None:
        self._state: tuple[str, bool] | None = None
        self._problems: dict[str, str] = {}
        self._policy: Policy | None = None

    def update(self, run: Run) -> None:
        """Compare with the last update."""
        state = run.unbalanced, run.readiness.ready
        # A reason in other words is no change, nor is one of several ranks that becomes ready.
        if state != self._state or (not state[1] and run.problems.keys() - self._problems.keys()):
            _log_readiness(run)
        self._state, self._problems = state, run.problems
        if run.policy is not self._policy:
            self._policy = run.policy
            _LOGGER.info("policy is %s", run.policy.value if run.policy else "not known yet")


def _log_readiness(run: Run) -> None:
    reasons = [f"{rank}: {reason}" for rank, reason in run.problems.items()]
    if len(reasons) > _MAX_REASONS:
        reasons[_MAX_REASONS:] = [f"and {len(reasons) - _MAX_REASONS} more"]
    if run.unbalanced:
        _LOGGER.warning("%s", run.readiness.reasons["run"])
    elif not run.problems:
        _LOGGER.info("every rank is ready")
    else:
        _LOGGER.warning("not ready: %s", "; ".join(reasons))
