"""The balanced servers of this user that run on this machine, and what tells them apart."""

from datetime import datetime
from pathlib import Path

from ultraep_serve.errors import NoServerError, RingError
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_directory import run_directory_of_port, running_run_directories
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingHeader

__all__ = ["find_run", "running_run"]

_START = "start one with `ultraep-serve vllm MODEL` (or sglang)"


def running_run(port: int | None = None) -> Path:
    """The run directory of the server on ``port``; without one, of the only server that runs.

    Raises NoServerError where there is none, and a list of them where there are several.
    """
    running = running_run_directories()
    if port is not None:
        path = run_directory_of_port(port)
        if path not in running:
            raise NoServerError(
                f"no balanced server of this user was started by ultraep-serve on port {port} of "
                f"this machine; {_START}"
            )
        return path
    if not running:
        raise NoServerError(f"no balanced server of this user runs on this machine; {_START}")
    if len(running) > 1:
        listed = "\n".join(f"  {path}  {_description(path)}" for path in running)
        raise NoServerError(
            f"{len(running)} balanced servers run on this machine; choose one with --run-dir:\n"
            f"{listed}"
        )
    return running[0]


def find_run(run_dir: Path | None = None, port: int | None = None) -> Path:
    """``run_dir`` where it is given, else as ``running_run``. Raises NoServerError."""
    if run_dir is None:
        return running_run(port)
    if not run_dir.is_dir():
        raise NoServerError(f"{run_dir} is not the run directory of a server; {_START}")
    return run_dir


def _description(path: Path) -> str:
    """Engine, ranks, process and start, from the ring of the lowest rank here."""
    header = _first_header(path)
    if header is None:
        return "no rank has joined yet"
    since = datetime.fromtimestamp(header.started_ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")
    ranks = header.shape.num_ranks
    return (
        f"{header.engine}, {ranks} ranks, rank {header.rank} is process {header.pid}, since {since}"
    )


def _first_header(path: Path) -> RingHeader | None:
    headers = []
    files = RunFiles(path)
    for number in files.rings():
        try:
            reader = RingReader(files.ring(number))
            headers.append(reader.header())
            reader.close()
        except RingError:
            continue
    return min(headers, key=lambda header: header.number, default=None)
