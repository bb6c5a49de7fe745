"""Processes over a made-up shared memory: a run that follows orders, and commands of ours.

python -m tests.support.live_run SHARED_MEMORY run NAME
python -m tests.support.live_run SHARED_MEMORY ultraep-serve status --json
"""

import subprocess
import sys
from pathlib import Path
from typing import IO

from ultraep_serve.cli import main
from ultraep_serve.telemetry import run_directory

__all__ = ["LiveRun", "command"]

_ROOT = Path(__file__).resolve().parents[2]


def command(shared_memory: Path, *words: str) -> list[str]:
    """The command line for ``words`` (``run NAME`` or ``ultraep-serve ...``)."""
    return [sys.executable, "-m", "tests.support.live_run", str(shared_memory), *words]


class LiveRun:
    """A process that has the rings and the control page of four ranks, and obeys."""

    def __init__(self, shared_memory: Path, name: str) -> None:
        """Returns when every rank is ready."""
        self._process = subprocess.Popen(
            command(shared_memory, "run", name),
            cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.path = Path(self._answer())

    def batch(self) -> None:
        """Serve one batch."""
        self._ask("batch")

    def policy(self) -> str:
        """The policy that the ranks have in force."""
        return self._ask("policy")

    def end(self) -> None:
        """End as an engine does, and leave the run directory."""
        self._process.communicate("end\n", timeout=60)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)

    def _ask(self, order: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _obey(name: str, orders: IO[str], answers: IO[str]) -> None:
    from tests.support.rings import planned_run  # loads a planner, which commands do without

    directory = run_directory.RunDirectory.create(name)
    run = planned_run(directory.path)
    print(directory.path, file=answers, flush=True)
    for order in orders:
        if order == "end\n":
            break
        if order == "batch\n":
            run.batch()
        print(run.control.policy.value, file=answers, flush=True)
    run.close()
    directory.leave()


if __name__ == "__main__":
    run_directory.SHARED_MEMORY = Path(sys.argv[1])
    if sys.argv[2] == "run":
        _obey(sys.argv[3], sys.stdin, sys.stdout)
    else:
        sys.exit(main(sys.argv[3:]))
