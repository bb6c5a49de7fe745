"""The balance of a running server, without a sidecar of its own or from one elsewhere.

The rings are read with the sidecar's own statistics, so the figures are those of ``/v1/balance``,
over the records that the rings still hold.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ultraep_serve.errors import BenchError, NoServerError
from ultraep_serve.sidecar.documents import Readiness
from ultraep_serve.sidecar.statistics import summarise
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.telemetry.run_directory import find_run

__all__ = ["ServerStatus", "status", "status_reader"]

_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class ServerStatus:
    """One server at one moment."""

    where: str  # its run directory, or the address of its sidecar
    answer: bytes  # JSON, what /v1/balance answers
    ready: bool  # /readyz would answer 200
    reasons: dict[str, str]  # why it is not ready or not balanced, by rank

    @property
    def document(self) -> dict[str, Any]:
        """``answer`` as a dictionary."""
        return dict(json.loads(self.answer))


def status(
    *, port: int | None = None, run_dir: str | Path | None = None, url: str | None = None
) -> dict[str, Any]:
    """The balance of a running server: what its sidecar answers to ``GET /v1/balance``.

    Without arguments that of the only balanced server of this user on this machine; else the one
    that ultraep-serve started on ``port``, the one with run directory ``run_dir``, or the one whose
    sidecar is at ``url``. No sidecar is needed except for ``url``, which also needs httpx.

    A server that could not be balanced, and runs all the same, is ``{"status": "unbalanced",
    "reason": ..., "detail": ...}``.

    Raises ``ultraep_serve.errors.NoServerError`` where no such server runs, none of its ranks has
    joined yet, or several run and none was chosen; ConfigError for a ``url`` that is none.
    """
    try:
        document = status_reader(port, Path(run_dir) if run_dir else None, url)().document
    except BenchError as error:
        raise NoServerError(str(error)) from error
    if document.keys() == {"detail"}:
        raise NoServerError(str(document["detail"]))
    return document


def status_reader(
    port: int | None = None, run_dir: Path | None = None, url: str | None = None
) -> Callable[[], ServerStatus]:
    """A function that reads the status now; the arguments choose a server as in ``status``.

    Raises NoServerError as ``status``; the function raises ConfigError for a ``url`` that is none,
    and BenchError where a sidecar there does not answer.
    """
    if url is not None:
        return _remote(url)
    path = find_run(run_dir, port)
    store = RunStore(path)
    return lambda: _read(store, path)


def _read(store: RunStore, path: Path) -> ServerStatus:
    run = store.poll()
    try:
        answer = summarise(run.held()).model_dump_json().encode()
    except NoRunError as error:
        text = json.dumps(error.document, ensure_ascii=False, separators=(",", ":"))
        answer = text.encode()
    return ServerStatus(str(path), answer, run.ready, run.reasons)


def _remote(url: str) -> Callable[[], ServerStatus]:
    from ultraep_serve.system.http import Endpoint, json_object  # they need httpx

    def read() -> ServerStatus:
        with Endpoint("the sidecar", "--url", url, _TIMEOUT_SECONDS) as endpoint:
            balance, ready = endpoint.call("GET", "/v1/balance"), endpoint.call("GET", "/readyz")
        for response in (balance, ready):
            if response.status_code not in (200, 503):
                raise endpoint.refused(response, "is this the address of a sidecar?")
        json_object(balance)
        try:
            found = Readiness.model_validate(json_object(ready))
        except ValidationError:
            raise endpoint.refused(ready, "is this the address of a sidecar?") from None
        return ServerStatus(endpoint.url, balance.content, found.ready, found.reasons)

    return read
