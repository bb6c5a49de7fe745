"""Run a command apart, for a limited time, and end everything that it has started."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

SECONDS_TO_DIE = 10.0  # a process may be held by the driver; nobody waits longer for it
SECONDS_TO_STOP = 3.0  # for a process that ends what it has started itself


def run_apart(command: Sequence[str], seconds: float, output: IO[bytes] | None = None) -> str:
    """How ``command`` failed, empty where it did not. After ``seconds`` it is killed.

    What it prints goes to ``output``, else where this process prints.
    """
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        return f"was not done after {seconds:.0f} s"
    finally:
        _end(process)
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with {code}" if code else ""


def stop_on_terminate() -> None:
    """Let SIGTERM end this program as an exception does, so that ``run_apart`` cleans up."""

    def stop(*_: Any) -> None:
        sys.exit("told to stop")

    signal.signal(signal.SIGTERM, stop)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it, and all of its session, are gone
    try:
        process.wait(SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not die; going on", file=sys.stderr, flush=True)
