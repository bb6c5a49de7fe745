"""Run one function on R processes and get back what each returned, raised or died of.

The processes are forked from a helper that has already imported torch and the core, so starting
eight of them takes less than a second. Whatever happens, none outlives the call.
"""

import multiprocessing
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ultraep_serve.errors import UltraEPError

RUN_PATH_PREFIX = "uep-ranks-"
_PRELOAD = ["tests.support._preload"]
_SHARED_MEMORY = Path("/dev/shm")
_SECONDS_TO_LEAVE = 5
_exit_codes = threading.Lock()  # each can be read once, and whoever starts a process reads all


class RankError(UltraEPError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended; exactly one of value, error and signal says it."""

    value: Any = None  # what the function returned
    error: str = ""  # type name of what it raised
    message: str = ""  # text of what it raised
    traceback: str = ""
    signal: int = 0  # that ended the process
    timed_out: bool = False  # killed here because its time was over


@contextmanager
def fresh_run_path() -> Iterator[Path]:
    """A new directory in shared memory (mode 0700), removed with all it holds at the end."""
    path = Path(tempfile.mkdtemp(prefix=RUN_PATH_PREFIX, dir=_SHARED_MEMORY))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 60.0
) -> list[Any]:
    """Values of ``function(rank, *args)`` by rank. Raises RankError if any rank failed."""
    outcomes = outcomes_of_ranks(function, num_ranks, *args, timeout_seconds=timeout_seconds)
    failed = [
        f"rank {rank}: {outcome.traceback or outcome}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.signal or outcome.timed_out
    ]
    if failed:
        raise RankError("\n".join(failed))
    return [outcome.value for outcome in outcomes]


def run_settings(
    function: Callable[[int, list[str]], list[Any]], num_ranks: int, names: Collection[str]
) -> dict[str, list[Any]]:
    """By name, what ``function`` gives on every rank, which has a run directory for each name."""
    with fresh_run_path() as path:
        run_dirs = [path / str(index) for index in range(len(names))]
        for run_dir in run_dirs:
            run_dir.mkdir(mode=0o700)
        found = run_ranks(function, num_ranks, list(map(str, run_dirs)), timeout_seconds=400.0)
    return {name: [ranks[index] for ranks in found] for index, name in enumerate(names)}


def outcomes_of_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 60.0
) -> list[RankOutcome]:
    """How ``function(rank, *args)`` ended on each of ``num_ranks`` processes.

    ``function`` is module-level and, like ``args``, can be pickled. Processes that still run after
    ``timeout_seconds`` are killed. May be called by several threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_run, args=(sender, function, rank, args), daemon=True
            )
            with _exit_codes:
                process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        return _collect(processes, pipes, time.monotonic() + timeout_seconds)
    finally:
        for process in processes:
            process.kill()
            _exit_code(process)
            with _exit_codes:
                process.close()
        for pipe in pipes:
            pipe.close()


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], deadline: float
) -> list[RankOutcome]:
    outcomes: list[RankOutcome] = [RankOutcome(timed_out=True)] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
                _exit_code(processes[rank], _SECONDS_TO_LEAVE)  # its exit is part of its run
            except EOFError:
                code = _exit_code(processes[rank]) or 0
                outcomes[rank] = RankOutcome(
                    error="" if code < 0 else "SystemExit", signal=max(0, -code)
                )
    return outcomes


def _exit_code(process: BaseProcess, seconds: float | None = None) -> int | None:
    """The exit code, once there is one; None where there is none after ``seconds``."""
    wait([process.sentinel], seconds)
    with _exit_codes:
        process.join(0)
        return process.exitcode


def _run(pipe: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    import torch  # here, so that whoever only makes run directories does not load it

    torch.set_num_threads(1)
    try:
        outcome = RankOutcome(value=function(rank, *args))
    except Exception as error:
        outcome = RankOutcome(
            error=type(error).__name__, message=str(error), traceback=traceback.format_exc()
        )
    pipe.send(outcome)
    pipe.close()
