"""The balance of a running server, without a sidecar of its own or from one elsewhere.

The rings are read with the sidecar's own statistics, so the figures are those of ``/v1/balance``,
over the records that the rings still hold.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import HttpUrl, TypeAdapter, ValidationError

from ultraep_serve.errors import ConfigError, NoServerError
from ultraep_serve.sidecar.balance import BalanceSnapshot, summarise
from ultraep_serve.sidecar.documents import NoBalance, Readiness
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.telemetry.run_directory import find_run

_TIMEOUT_SECONDS = 10.0
_MOST_BYTES = 64 << 20
_WRONG = "is this the address of a sidecar of this version?"
_BALANCE: TypeAdapter[Any] = TypeAdapter(BalanceSnapshot | NoBalance)


@dataclass(frozen=True)
class ServerStatus:
    """One server at one moment."""

    where: str  # its run directory, or the address of its sidecar
    document: dict[str, Any]  # what /v1/balance answers


def status(
    *, port: int | None = None, run_dir: str | Path | None = None, url: str | None = None
) -> dict[str, Any]:
    """The balance of a running server: what its sidecar answers to ``GET /v1/balance``.

    Without arguments that of the only balanced server of this user on this machine; else the one
    that ultraep-serve started on ``port``, the one with run directory ``run_dir``, or the one whose
    sidecar is at ``url``. No sidecar is needed except for ``url``, which also needs httpx.

    Of a server that could not be balanced, and runs all the same, it has no figures, and the
    ``status`` "unbalanced".

    Raises ``ultraep_serve.errors.NoServerError`` where no such server runs, none of its ranks has
    joined yet, or several run and none was chosen; ConfigError for a ``url`` that is none.
    """
    document = status_reader(port, Path(run_dir) if run_dir else None, url)().document
    if "engine" not in document and document["status"] != "unbalanced":
        raise NoServerError(document["detail"])
    return document


def status_reader(
    port: int | None = None, run_dir: Path | None = None, url: str | None = None
) -> Callable[[], ServerStatus]:
    """A function that reads the status now; the arguments choose a server as in ``status``.

    Raises as ``status``; the function raises NoServerError where no sidecar answers at ``url``.
    """
    if url is not None:
        return _remote(url)
    path = find_run(run_dir, port)
    store = RunStore(path)
    return lambda: _read(store, path)


def _read(store: RunStore, path: Path) -> ServerStatus:
    try:
        answer: Readiness = summarise(store.poll())
    except NoRunError as error:
        answer = error.answer
    return ServerStatus(str(path), answer.model_dump(mode="json"))


def _remote(url: str) -> Callable[[], ServerStatus]:
    import httpx  # nothing else needs it

    try:
        TypeAdapter(HttpUrl).validate_python(url)
    except ValidationError:
        raise ConfigError(f"--url = {url!r} must be http://HOST:PORT") from None

    def get(client: httpx.Client, path: str) -> bytes:
        body, deadline = b"", time.monotonic() + _TIMEOUT_SECONDS
        with client.stream("GET", path) as response:
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _MOST_BYTES or time.monotonic() > deadline:
                    raise NoServerError(f"{url}{path} does not end; {_WRONG}")
        return body

    def read() -> ServerStatus:
        try:
            with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False) as client:
                balance = get(client, "/v1/balance")
            _BALANCE.validate_json(balance)
        except (httpx.HTTPError, UnicodeError) as error:
            raise NoServerError(
                f"the sidecar at {url} cannot be reached ({str(error) or type(error).__name__}); "
                "start it with `ultraep-serve vllm MODEL` (or sglang), or give its address with "
                "--url"
            ) from error
        except ValidationError as error:
            raise NoServerError(f"{url} gave an answer that is not understood; {_WRONG}") from error
        return ServerStatus(url, json.loads(balance))

    return read
