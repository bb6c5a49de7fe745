"""The balance of a running server on this machine, without a sidecar.

The rings are read with the sidecar's own statistics, so the figures are those of ``/v1/balance``,
over the records that the rings still hold.
"""

from pathlib import Path
from typing import Any

from ultraep_serve.errors import NoServerError
from ultraep_serve.sidecar.balance import summarise
from ultraep_serve.sidecar.documents import Readiness
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.telemetry.run_directory import find_run


def status(*, port: int | None = None, run_dir: str | Path | None = None) -> dict[str, Any]:
    """The balance of a running server: what its sidecar answers to ``GET /v1/balance``.

    Without arguments that of the only balanced server of this user on this machine; else the one
    that ultraep-serve started on ``port``, or the one with run directory ``run_dir``.

    Of a server that could not be balanced, and runs all the same, it has no figures, and the
    ``status`` "unbalanced".

    Raises ``ultraep_serve.errors.NoServerError`` where no such server runs, none of its ranks has
    joined yet, or several run and none was chosen.
    """
    document = status_now(RunStore(find_run(Path(run_dir) if run_dir else None, port)))
    if "engine" not in document and document["status"] != "unbalanced":
        raise NoServerError(document["detail"])
    return document


def status_now(store: RunStore) -> dict[str, Any]:
    """What ``/v1/balance`` answers from the rings of ``store``, also where it has no figures."""
    try:
        answer: Readiness = summarise(store.poll())
    except NoRunError as error:
        answer = error.answer
    return answer.model_dump(mode="json")
